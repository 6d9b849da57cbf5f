"""The arithmetics in which kernels are compared, and the limits of an H200."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diffnet.geometry.errors import OptionError


@dataclass(frozen=True)
class Arithmetic:
    """How a benchmark stores and multiplies numbers.

    storage: dtype of the tensors
    tf32: whether matrix products may compute float32 as tf32, or as the sum of two bfloat16 numbers; otherwise our
        kernels take three
    tflops: rate of matrix products of an H200, in 10¹² operations per second
    """

    storage: torch.dtype
    tf32: bool
    tflops: float

    @property
    def bytes(self) -> int:
        """Bytes per number."""
        return self.storage.itemsize


# The rates were measured on one H200. Where tf32 isn't allowed, the fastest way is six products in bf16, a sixth of its
# rate. The data sheet gives 67 without matrix units.
ARITHMETICS = {
    "fp32": Arithmetic(torch.float32, False, 113),
    "tf32": Arithmetic(torch.float32, True, 383),
    "bf16": Arithmetic(torch.bfloat16, False, 680),
    "fp16": Arithmetic(torch.float16, False, 680),
}

# Measured rate of a copy within the memory of one H200, in bytes per second. Reads and writes both count.
H200_COPY = 4.27e12


def arithmetic(name: str) -> Arithmetic:
    """Look up an arithmetic by name. Raises OptionError for an unknown name."""
    if name not in ARITHMETICS:
        raise OptionError(f"dtypes should be among {', '.join(ARITHMETICS)}, got {name!r}")
    return ARITHMETICS[name]


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Allow or forbid tf32 in float32 matrix products inside the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def floor_ms(flops: float, moved: float, kind: Arithmetic) -> float:
    """The milliseconds an H200 needs at least: the longer of computing `flops` operations and moving `moved` bytes.

    >>> floor_ms(flops=680e9, moved=1e6, kind=arithmetic("bf16"))
    1.0
    """
    return 1e3 * max(flops / (kind.tflops * 1e12), moved / H200_COPY)
