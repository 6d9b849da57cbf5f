"""Functions of positions alone: rotations, principal axes, farthest point sampling and closest points of meshes."""
