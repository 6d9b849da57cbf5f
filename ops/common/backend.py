"""Which of an operation's implementations runs: plain PyTorch, or the Triton kernel that computes the same."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Backend: TypeAlias = Literal["auto", "torch", "triton"]

# Found once at import, so that torch.compile sees a constant. Triton itself is imported with the first kernel.
HAS_TRITON = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_triton(backend: Backend, *tensors: Tensor) -> bool:
    """Whether the Triton kernels should compute with these tensors.

    "auto": where Triton is there and all tensors are float32, bfloat16 or float16 on a GPU
    "torch": never
    "triton": always; on the CPU that takes Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported)

    Raises ValueError for another backend, and RuntimeError where "triton" can't be had.
    """
    if backend == "auto":
        return HAS_TRITON and all(t.is_cuda and t.dtype in KERNEL_DTYPES for t in tensors)
    if backend == "torch":
        return False
    if backend != "triton":
        raise ValueError(f"backend should be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if not HAS_TRITON:
        raise RuntimeError("backend 'triton' needs the package triton, which isn't installed")
    if os.environ.get("TRITON_INTERPRET") != "1" and not all(t.is_cuda for t in tensors):
        raise RuntimeError("backend 'triton' needs tensors on a GPU, or TRITON_INTERPRET=1 in the environment")
    return True
