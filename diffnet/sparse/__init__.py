"""Layers on sparse matrices without blocks, for networks of any kind."""
