"""Pairs of meshes, and what is known of their correspondences."""
