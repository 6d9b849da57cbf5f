"""Whole training steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.loops.matrix_products import matrix_products
from diffnet.benchmarks.loops.peers import loop, training_peers
from diffnet.benchmarks.loops.workload import BLOCKS, one_mesh

STEPS = 10  # per timed run


@benchmark("train-step", metrics=("ms", "MB"))
def train_step(options: Options) -> Iterator[Case]:
    """A step (forward, cross-entropy, backward, Adam) of a network of 4 blocks with dropout, on one mesh.

    Times are wall-clock times of steps that follow each other. The original's form computes in float32, or in tf32 if
    the dtype is tf32. The others run under autocast to the dtype.
    """
    k = options.k or 128
    for size in sweep(options, dtypes=("bf16", "tf32"), widths=(128,), vertices=(2_000, 10_000, 50_000, 200_000)):
        c, v = size.width, size.vertices
        work = one_mesh(size, k)
        peers = training_peers(work, options.compile)
        if size.device.type == "cpu":
            peers["diffnet-cpu"] = first_made(partial(loop, work, "auto"))
            peers["matrix-products"] = first_made(partial(matrix_products, work, backward=True))
        yield Case(
            size.parameters(k=k),
            peers,
            # Per block and vertex, forward and backward: both spectral transforms, gradient features, MLP.
            flops=float(BLOCKS * v * (8 * k * c + 36 * k * c + 30 * c * c)),
            # Every part of a block reads its inputs and writes its outputs once.
            bytes=float(BLOCKS * v * size.kind.bytes * (8 * k + 18 * c)),
            kind=size.kind,
            wall_clock=True,
            calls=STEPS,
        )
