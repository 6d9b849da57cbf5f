"""Labeled data sets on disk."""
