"""The command `diffnet train NAME` of each task."""
