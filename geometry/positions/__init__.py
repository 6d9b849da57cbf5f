"""Functions of positions alone: rotations, farthest point sampling and closest points of meshes."""
