"""What a benchmark is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from diffnet.benchmarks.harness.arithmetic import Arithmetic, floor_ms

Parameter: TypeAlias = int | float | str
Metric: TypeAlias = Literal["ms", "TFLOP/s", "GB/s", "MB"]


class Unavailable(RuntimeError):
    """Raised by a peer that can't run here. The message says why, and becomes its row in the results."""


@dataclass(frozen=True)
class Options:
    """What the user asks for. None leaves a choice to each benchmark.

    vertices, widths: the sizes to measure, V and C
    k: eigenpairs
    dtypes: names of arithmetics, see `arithmetic.ARITHMETICS`
    peers: names, with commas between them; measure these only
    seconds: to spend on measuring one case
    flush: empty the GPU's L2 cache before each run
    compile: measure what torch.compile makes of the others, too
    meshes: a folder of meshes for what is about meshes; None means generated ones
    """

    device: torch.device
    vertices: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None
    k: int | None = None
    dtypes: tuple[str, ...] | None = None
    peers: str | None = None
    seconds: float = 1.0
    flush: bool = True
    compile: bool = True
    meshes: Path | None = None


@dataclass(frozen=True)
class Case:
    """One comparison: callables that do the same work, to be timed side by side.

    parameters: what tells this case from the others of its benchmark; the same names, in the same order, in every case
    peers: called without arguments; each returns once its work is done or, on a GPU, queued. The first call may
        build and compile. Raise `Unavailable` where a peer can't run.
    flops, bytes: the useful operations (by the direct form's count) and the fewest bytes to be moved
    executed_flops: by peer, where a peer computes by other formulas than the direct form
    kind: the arithmetic, where what an H200 needs at least is to be compared with
    times: by peer, where one does only a part of the work: its milliseconds count so often. Its name should say so.
    """

    parameters: Mapping[str, Parameter]
    peers: Mapping[str, Callable[[], object]]
    flops: float | None = None
    bytes: float | None = None
    executed_flops: Mapping[str, float] = field(default_factory=dict)
    kind: Arithmetic | None = None
    times: Mapping[str, int] = field(default_factory=dict)

    @property
    def floor_ms(self) -> float | None:
        """The time that an H200 needs at least, by the formulas with the fewest operations."""
        if self.kind is None or self.flops is None or self.bytes is None:
            return None
        return floor_ms(min([self.flops, *self.executed_flops.values()]), self.bytes, self.kind)


@dataclass(frozen=True)
class Benchmark:
    """A named source of cases. They are made one by one, measured as they come, and what surrounds a `yield` (a
    precision that is set, inputs that are held) lasts for as long as its case is measured.

    x: the parameter that plots have on their x axis
    metrics: what they have on the y axis, a row of panels for each
    """

    name: str
    summary: str
    cases: Callable[[Options], Iterator[Case]]
    x: str
    metrics: tuple[Metric, ...]


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str, *, x: str = "vertices", metrics: tuple[Metric, ...] = ("ms",)
) -> Callable[[Callable[[Options], Iterator[Case]]], Callable[[Options], Iterator[Case]]]:
    """Register a generator of cases; the first line of its docstring says what is measured."""

    def register(cases: Callable[[Options], Iterator[Case]]) -> Callable[[Options], Iterator[Case]]:
        if name in BENCHMARKS:
            raise ValueError(f"there are two benchmarks of the name {name!r}")
        summary = (cases.__doc__ or "").strip().split("\n")[0]
        BENCHMARKS[name] = Benchmark(name, summary, cases, x, metrics)
        return cases

    return register
