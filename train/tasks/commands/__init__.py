"""The commands `diffnet train NAME`, one for each task."""
