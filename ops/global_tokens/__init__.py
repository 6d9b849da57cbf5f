"""Tokens of whole meshes, and channels that conditions of a mesh scale and shift."""
