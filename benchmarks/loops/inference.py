"""Outputs of a network without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from diffnet import graphed
from diffnet.benchmarks.harness.captured import CapturedStep
from diffnet.benchmarks.harness.peers import first_made, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.loops.matrix_products import matrix_products
from diffnet.benchmarks.loops.peers import Step, evaluation, needs_gpu
from diffnet.benchmarks.loops.workload import BLOCKS, Workload, one_mesh
from diffnet.benchmarks.original.network import original_network
from diffnet.ops import Backend

CALLS = 10  # per timed run


@benchmark("inference", metrics=("ms", "MB"))
def inference(options: Options) -> Iterator[Case]:
    """The outputs of a network of 4 blocks, without gradients, on one mesh.

    Times are wall-clock times of calls that follow each other. The original's form computes in float32, or in tf32 if
    the dtype is tf32. The others run under autocast to the dtype.
    """
    k = options.k or 128
    sizes = (2_000, 10_000, 50_000, 200_000, 1_000_000)
    for size in sweep(options, dtypes=("bf16", "tf32"), widths=(128,), vertices=sizes):
        c, v = size.width, size.vertices
        work = one_mesh(size, k)
        peers = _peers(work, options.compile)
        if size.device.type == "cpu":
            peers["diffnet-cpu"] = first_made(partial(_loop, work, "auto"))
            peers["matrix-products"] = first_made(partial(matrix_products, work, backward=False))
        yield Case(
            size.parameters(k=k),
            peers,
            # Per block and vertex: both spectral transforms, gradient features, MLP.
            flops=float(BLOCKS * v * (4 * k * c + 12 * k * c + 10 * c * c)),
            # A block computes everything but the sum over vertices in one pass.
            bytes=float(BLOCKS * v * size.kind.bytes * (4 * k + 3 * c)),
            kind=size.kind,
            wall_clock=True,
            calls=CALLS,
        )


def _peers(work: Workload, compile: bool) -> dict[str, Run]:
    peers: dict[str, Run] = {
        "original": first_made(partial(_original, work)),
        "plain": first_made(partial(_loop, work, "torch")),
        "diffnet": first_made(partial(_loop, work, "triton")),
        "diffnet-graphed": first_made(partial(_loop, work, "triton", graphs=True)),
        "diffnet-captured": first_made(partial(_captured, work)),
    }
    if compile:
        peers["original-compiled"] = first_made(partial(_original, work, compile=True))
        peers["plain-compiled"] = first_made(partial(_loop, work, "torch", compile=True))
    return {name: on_kernels(work.device, run) if name.startswith("diffnet") else run for name, run in peers.items()}


def _loop(work: Workload, backend: Backend, *, compile: bool = False, graphs: bool = False) -> Step:
    network = work.network(backend).eval()
    if graphs:
        needs_gpu(work.device)
        graphed(network)
    samples = work.plain_samples() if backend == "torch" else work.samples_of_a_peer()
    return evaluation(work, torch.compile(network) if compile else network, samples)


def _original(work: Workload, compile: bool = False) -> Step:
    forward = partial(original_network, work.network("torch").eval())
    x = work.samples[0].features
    return torch.no_grad()(partial(torch.compile(forward) if compile else forward, x, work.original_meshes, [len(x)]))


def _captured(work: Workload) -> Step:
    needs_gpu(work.device)
    return CapturedStep(_loop(work, "triton"))
