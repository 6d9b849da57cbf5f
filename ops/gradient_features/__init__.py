"""Spatial gradient features."""

from diffnet.ops.gradient_features.op import gradient_features, spectral_gradient_features, values_and_gradient_features

__all__ = [
    "gradient_features",
    "spectral_gradient_features",
    "values_and_gradient_features",
]
