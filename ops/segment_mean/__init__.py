"""Weighted means over the meshes of a batch."""
