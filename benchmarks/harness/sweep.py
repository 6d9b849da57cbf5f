"""The sizes that a benchmark measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diffnet.benchmarks.harness.arithmetic import Arithmetic, arithmetic, matmul_precision
from diffnet.benchmarks.harness.registry import Options, Parameter


@dataclass(frozen=True)
class Size:
    """One combination of a dtype, a width and a number of vertices, on a device."""

    dtype: str
    width: int
    vertices: int
    device: torch.device

    @property
    def kind(self) -> Arithmetic:
        return arithmetic(self.dtype)

    @property
    def storage(self) -> torch.dtype:
        return self.kind.storage

    def parameters(self, **others: Parameter) -> dict[str, Parameter]:
        """Parameters of a `Case`: the dtype, then the others, then the width and the vertices."""
        return {"dtype": self.dtype, **others, "width": self.width, "vertices": self.vertices}


def sweep(
    options: Options,
    *,
    dtypes: tuple[str, ...] = ("bf16",),
    widths: tuple[int, ...] = (64, 128, 256),
    vertices: tuple[int, ...] = (1_000, 10_000, 100_000, 524_288, 1_000_000),
) -> Iterator[Size]:
    """All combinations of dtypes, widths and vertices, as the options or the defaults give them.

    The precision of matrix products is set while a size is in use. Compiled functions are dropped before each size,
    because torch.compile stops compiling a function after a number of different sizes.
    """
    for dtype in options.dtypes or dtypes:
        for width in options.widths or widths:
            for count in options.vertices or vertices:
                torch._dynamo.reset()
                with matmul_precision(arithmetic(dtype).tf32):
                    yield Size(dtype, width, count, options.device)
