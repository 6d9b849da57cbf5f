"""Projection onto an eigenbasis, evaluation in it, and heat diffusion in it."""

from diffnet.ops.spectral.op import diffuse, from_spectral, to_spectral

__all__ = [
    "diffuse",
    "from_spectral",
    "to_spectral",
]
