"""Operators of one mesh or of many, and their cache entries."""
