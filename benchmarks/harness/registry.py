"""Benchmarks, their cases and options, and the registry of all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from diffnet.benchmarks.harness.arithmetic import Arithmetic, floor_ms

Parameter: TypeAlias = int | float | str
Metric: TypeAlias = Literal["ms", "TFLOP/s", "GB/s", "MB"]
Run: TypeAlias = Callable[[], object]


class Unavailable(RuntimeError):
    """Raised by a peer that can't run on this machine. The message becomes the peer's row in the results."""


@dataclass(frozen=True)
class Options:
    """The user's options. None leaves a choice to each benchmark.

    device: the device to measure on
    vertices, widths: the sizes to measure, V and C
    k: number of eigenpairs
    dtypes: names of arithmetics, see `arithmetic.ARITHMETICS`
    peers: comma-separated names of the only peers to measure
    seconds: time to spend on each case
    flush: whether to empty the GPU's L2 cache before each run
    compile: whether to measure the peers under torch.compile, too
    meshes: a folder of meshes for the preprocessing benchmarks; None means generated meshes
    data: a folder of labeled meshes for the benchmark `command`
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
    data: Path | None = None


@dataclass(frozen=True)
class Case:
    """One comparison: peers that do the same work and are timed side by side.

    parameters: distinguish this case from the other cases of its benchmark. All cases of a benchmark have the same
        names in the same order.
    peers: functions without arguments. A peer returns when its work is done or, on a GPU, queued. The first call may
        build and compile. A peer raises `Unavailable` if it can't run.
    flops: useful operations, counted by the direct form
    bytes: fewest bytes that must be moved
    executed_flops: operations by peer, for peers that use other formulas than the direct form
    design_bytes: bytes by peer that its kernels move, for peers whose kernels are known. A matrix counts once for each
        kernel that reads it, and once for the kernel that writes it.
    kind: the arithmetic; None if the case has no floor
    times: factors by peer, for peers that do only a part of the work. Their milliseconds are multiplied by the factor.
        Their names should say so.
    wall_clock: whether to measure the time that a caller waits until the GPU has finished, Python included, instead of
        the time of the GPU alone
    calls: calls of a peer per timed run. They follow each other without waiting for the GPU, as the steps of a training
        loop do, and the time is divided by their number. More than 1 call needs `wall_clock`. The time of the GPU alone
        is measured, too.
    warm_up: runs of each peer before the first measured one. Loops over many meshes record graphs in several passes.
    details: further columns of the results. If there are any, each peer runs once, and returns a mapping of these
        names to numbers.
    """

    parameters: Mapping[str, Parameter]
    peers: Mapping[str, Run]
    flops: float | None = None
    bytes: float | None = None
    executed_flops: Mapping[str, float] = field(default_factory=dict)
    design_bytes: Mapping[str, float] = field(default_factory=dict)
    kind: Arithmetic | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    wall_clock: bool = False
    calls: int = 1
    warm_up: int = 3
    details: tuple[str, ...] = ()

    @property
    def floor_ms(self) -> float | None:
        """The milliseconds an H200 needs at least, by the formulas with the fewest operations."""
        if self.kind is None or self.flops is None or self.bytes is None:
            return None
        return floor_ms(min([self.flops, *self.executed_flops.values()]), self.bytes, self.kind)

    def design_ms(self, peer: str) -> float | None:
        """The milliseconds an H200 needs at least for what a peer computes and moves, None if that is not known."""
        flops, moved = self.executed_flops.get(peer, self.flops), self.design_bytes.get(peer)
        if self.kind is None or flops is None or moved is None:
            return None
        return floor_ms(flops, moved, self.kind)


Cases: TypeAlias = Callable[[Options], Iterator[Case]]


@dataclass(frozen=True)
class Benchmark:
    """A named generator of cases.

    Each case is measured before the next one is generated. Code around a `yield`, such as a context manager, is
    therefore in effect while the case is measured.

    x: the parameter on the x axis of plots
    metrics: the quantities on the y axis; each gets its own rows of panels
    """

    name: str
    summary: str
    cases: Cases
    x: str
    metrics: tuple[Metric, ...]


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(name: str, *, x: str = "vertices", metrics: tuple[Metric, ...] = ("ms",)) -> Callable[[Cases], Cases]:
    """Register a generator of cases. The first line of its docstring becomes the summary.

    Raises ValueError if the name is already registered.
    """

    def register(cases: Cases) -> Cases:
        if name in BENCHMARKS:
            raise ValueError(f"a benchmark called {name!r} is already registered")
        summary = (cases.__doc__ or "").strip().split("\n")[0]
        BENCHMARKS[name] = Benchmark(name, summary, cases, x, metrics)
        return cases

    return register
