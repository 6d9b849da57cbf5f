"""Implicit heat diffusion by conjugate gradients."""

from diffnet.ops.implicit.op import implicit_diffusion

__all__ = [
    "implicit_diffusion",
]
