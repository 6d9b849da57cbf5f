"""Functional maps between shapes, and maps of their points."""
