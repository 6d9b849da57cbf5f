"""Learned diffusion and the gradient features of its result."""

from diffnet.ops.diffusion_features.op import diffusion_and_gradient_features

__all__ = [
    "diffusion_and_gradient_features",
]
