"""Measurements of what networks of `diffnet train` reach, each as one program that writes a CSV file."""
