"""Multilayer perceptrons on several inputs."""

from diffnet.ops.mlp.op import mlp

__all__ = [
    "mlp",
]
