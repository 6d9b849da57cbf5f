"""Triton kernels and the functions that launch them. They need Triton, so nothing imports them before it computes."""
