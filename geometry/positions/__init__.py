"""Functions of positions alone: random rotations and farthest point sampling."""
