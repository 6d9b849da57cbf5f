"""Data sets in a few large files, shards, which hold meshes with their labels and operators."""
