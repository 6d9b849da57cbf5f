"""The arithmetics that kernels are compared in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diffnet.geometry.errors import OptionError


@dataclass(frozen=True)
class Arithmetic:
    """storage: of tensors; tf32: whether matrix products may take float32 as tf32 or as two bfloat16 numbers;
    tflops: measured on an H200"""

    storage: torch.dtype
    tf32: bool
    tflops: float

    @property
    def bytes(self) -> int:
        return self.storage.itemsize


# Rates of matrix products measured on one H200; that of float32 without tensor cores is its data sheet's.
ARITHMETICS = {
    "fp32": Arithmetic(torch.float32, False, 67),
    "tf32": Arithmetic(torch.float32, True, 383),
    "bf16": Arithmetic(torch.bfloat16, False, 680),
    "fp16": Arithmetic(torch.float16, False, 680),
}

# A copy within the memory of one H200, reading and writing, in bytes a second.
H200_COPY = 4.27e12


def arithmetic(name: str) -> Arithmetic:
    """Raises OptionError for an unknown name."""
    if name not in ARITHMETICS:
        raise OptionError(f"dtypes should be among {', '.join(ARITHMETICS)}, got {name!r}")
    return ARITHMETICS[name]


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Switch tf32 on or off for as long as the context lasts."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def floor_ms(flops: float, moved: float, kind: Arithmetic) -> float:
    """The larger of the times that an H200 takes to compute `flops` and to move so many bytes."""
    return 1e3 * max(flops / (kind.tflops * 1e12), moved / H200_COPY)
