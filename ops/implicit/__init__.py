"""Implicit heat diffusion by conjugate gradients."""
