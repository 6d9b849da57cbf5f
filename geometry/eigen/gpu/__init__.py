"""The eigensolver on a GPU."""
