"""Spatial gradient features."""
