"""CUDA graphs of networks that serve batches of any size."""

from diffnet.graphed.forward import graphed

__all__ = ["graphed"]
