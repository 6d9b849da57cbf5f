"""A training step and the augmentation of meshes."""
