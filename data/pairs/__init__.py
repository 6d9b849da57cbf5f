"""Pairs of meshes, and their known correspondences."""
