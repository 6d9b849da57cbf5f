"""Layers on block-sparse matrices."""
