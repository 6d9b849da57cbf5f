"""Which form of an operation computes: the definition, Triton kernels, or a faster form for CPUs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from diffnet.ops.common.compiler import PLAIN_TYPES, under_transforms
from diffnet.ops.common.precision import allows_tf32, compute_dtype, promoted_dtype
from diffnet.ops.common.tiling import has_large_shared_memory, multiplies_bfloat16

Backend: TypeAlias = Literal["auto", "torch", "triton"]

# Looked up once at import, so that torch.compile sees a constant. Triton itself is imported by the first kernel launch.
HAS_TRITON = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def use_definition(backend: Backend) -> bool:
    """Return whether an operation has to be computed in plain PyTorch: for "torch", and under a transform for "auto".

    Transforms are those of `torch.func` and forward-mode derivatives. Only plain operations of PyTorch have them all.
    """
    return backend == "torch" or (backend == "auto" and (under_transforms() or forward_ad._current_level >= 0))


def use_cpu_form(backend: Backend, *tensors: Tensor) -> bool:
    """Return whether an operation's own form for CPUs computes with these tensors. The definition does otherwise.

    It does for "auto", but not while something is traced or transformed, for float16, and for tensors of inference mode
    in training.
    """
    if backend != "auto" or use_definition(backend) or torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    if torch.is_grad_enabled() and any(t.is_inference() for t in tensors):
        return False  # they can't be saved for the backward
    for t in tensors:  # a loop takes half the time of `all`
        if type(t) not in PLAIN_TYPES or not t.is_cpu or t.dtype not in CPU_DTYPES:
            return False
    if not torch.is_autocast_enabled("cpu"):
        return True
    # Autocast leaves float64 as it is.
    return torch.get_autocast_dtype("cpu") in CPU_DTYPES and promoted_dtype(*tensors) != torch.float64


def use_kernels(backend: Backend, *tensors: Tensor, matrix: bool = False) -> bool:
    """Decide whether Triton kernels compute with these tensors.

    Args:
        backend: "auto" takes the kernels if Triton is installed and all tensors are float32, bfloat16 or float16 on a
            GPU, and not under a transform, see `use_definition`. "torch" never takes them. "triton" always takes them;
            on the CPU this needs Triton's interpreter (TRITON_INTERPRET=1 in the environment before Triton is
            imported).
        tensors: the floating-point inputs.
        matrix: whether the kernels are mostly matrix products. They multiply float32 as sums of bfloat16 numbers, see
            `ops.common.precision.dot_precision`. "auto" leaves float32 to PyTorch on GPUs that are not faster with
            them: below compute capability 8, and where tf32 isn't allowed on all but data-center GPUs of Hopper and
            Blackwell (9 and 10). docs/kernels.md says why.

    Raises:
        ValueError: for an unknown backend, and if "triton" is asked to compute in float64.
        RuntimeError: if "triton" is not available.
    """
    if use_definition(backend):
        return False
    if backend == "auto":
        if not HAS_TRITON:
            return False
        for t in tensors:  # a loop takes half the time of `all`
            if not t.is_cuda or t.dtype not in KERNEL_DTYPES:
                return False
        return not matrix or compute_dtype(*tensors) != torch.float32 or _multiplies_float32(tensors[0])
    check_backend(backend)
    if not HAS_TRITON:
        raise RuntimeError("backend 'triton' needs the package triton, which isn't installed")
    if os.environ.get("TRITON_INTERPRET") != "1" and not all(t.is_cuda for t in tensors):
        raise RuntimeError("backend 'triton' needs tensors on a GPU, or TRITON_INTERPRET=1 in the environment")
    dtypes = [compute_dtype(*tensors)] if matrix and tensors else [t.dtype for t in tensors]
    for dtype in dtypes:
        if dtype not in KERNEL_DTYPES:
            raise ValueError(f"backend 'triton' computes in {', '.join(map(str, KERNEL_DTYPES))}, got {dtype}")
    return True


def check_backend(backend: Backend) -> None:
    """Raise ValueError for an unknown backend."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend should be one of {', '.join(get_args(Backend))}, got {backend!r}")


def _multiplies_float32(tensor: Tensor) -> bool:
    """Return whether sums of bfloat16 numbers are the fast way to multiply float32 on the tensor's GPU."""
    return multiplies_bfloat16(tensor) if allows_tf32() else has_large_shared_memory(tensor)
