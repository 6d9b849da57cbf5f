"""Distances along surfaces, and the errors of correspondences that they give."""
