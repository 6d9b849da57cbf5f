"""Functions of positions alone: random rotations, farthest point sampling and closest points of meshes."""
