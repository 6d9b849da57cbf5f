"""Weighted means over the meshes of a batch."""

from diffnet.ops.segment_mean.op import segment_mean

__all__ = [
    "segment_mean",
]
