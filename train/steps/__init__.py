"""A training step, its CUDA graphs, and what changes meshes before it and weights after it."""
