"""Learned diffusion and the gradient features of its result."""
