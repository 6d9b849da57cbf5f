"""Meshes with fewer faces."""
