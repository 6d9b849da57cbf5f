"""A network and the file of plain operations that `diffnet export` makes of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.loops.peers import Step, evaluation
from diffnet.benchmarks.loops.workload import BLOCKS, Workload, one_mesh
from diffnet.train import export_network, exported_inputs

CALLS = 10  # per timed run


@benchmark("exported", metrics=("ms", "MB"))
def exported(options: Options) -> Iterator[Case]:
    """The outputs of a network of 4 blocks, without gradients, on one mesh, and those of its exported file.

    `exported` is `torch.export.load(file).module()`, and `exported-compiled` the same file under AOTInductor. Times are
    wall-clock times of calls that follow each other.
    """
    k = options.k or 128
    for size in sweep(options, dtypes=("fp32",), widths=(128,), vertices=(2_000, 10_000, 50_000)):
        work = one_mesh(size, k)
        peers: dict[str, Run] = {
            "diffnet": first_made(partial(_eager, work)),
            "exported": first_made(partial(_exported, work)),
        }
        if options.compile:
            peers["exported-compiled"] = first_made(partial(_exported, work, compile=True))
        c, v = size.width, size.vertices
        flops = float(BLOCKS * v * (4 * k * c + 12 * k * c + 10 * c * c))  # as in `inference`
        yield Case(size.parameters(k=k), peers, flops=flops, kind=size.kind, wall_clock=True, calls=CALLS)


def _eager(work: Workload) -> Step:
    return evaluation(work, work.network("auto").eval(), work.samples_of_a_peer())


def _exported(work: Workload, compile: bool = False) -> Step:
    # Imported here, because PyTorch's compiler takes seconds. AOTInductor has no public name yet.
    from torch import _inductor as inductor
    from torch.export.passes import move_to_device_pass

    network, sample = work.network("auto").eval(), work.samples[0]
    with tempfile.TemporaryDirectory() as folder:
        export_network(network, Path(folder) / "net.pt2")
        program = torch.export.load(Path(folder) / "net.pt2")
        program = move_to_device_pass(program, work.device)
        run: Callable[..., Any] = program.module()
        if compile:
            package = inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "compiled.pt2"))
            run = inductor.aoti_load_package(package)
    inputs = exported_inputs(network, sample.features, sample.operators)
    return torch.no_grad()(partial(run, **inputs))
