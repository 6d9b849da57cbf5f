"""How many of a network's predictions stay the same when its meshes change: `diffnet robustness`."""
