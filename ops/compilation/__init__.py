"""Compilation of kernels in another process."""
