"""Laplacian, tangent frames and gradients of a mesh."""
