"""CUDA graphs of networks that serve batches of any size."""

from diffnet.cuda_graphs.forward import graphed

__all__ = ["graphed"]
