"""Meshes with fewer faces, and values from one mesh to another of the same surface."""
