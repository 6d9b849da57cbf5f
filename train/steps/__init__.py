"""A training step, its CUDA graphs, the augmentation of meshes and the averaging of weights."""
