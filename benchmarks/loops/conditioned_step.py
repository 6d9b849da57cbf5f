"""Training steps of networks with conditions and with tokens of whole meshes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffnet import DiffusionNet, GraphedStep
from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.loops.peers import Step
from diffnet.benchmarks.loops.workload import BLOCKS, CLASSES, INPUTS, Workload, one_mesh

STEPS = 10  # per timed run
CONDITIONS: dict[str, Any] = {"condition_channels": 2}
TOKENS: dict[str, Any] = {"global_tokens": 16}


@benchmark("conditioned-step", metrics=("ms", "MB"))
def conditioned_step(options: Options) -> Iterator[Case]:
    """A step with two conditions of the mesh, with 16 tokens, with both and with neither, in wall-clock time.

    The network has 4 blocks and no dropout. On a GPU, each step is one CUDA graph, of `GraphedStep`.
    """
    k = options.k or 128
    for size in sweep(options, dtypes=("bf16",), widths=(128,), vertices=(10_000,)):
        work = one_mesh(size, k)
        networks = {"neither": {}, "conditions": CONDITIONS, "tokens": TOKENS, "both": CONDITIONS | TOKENS}
        peers: dict[str, Run] = {name: first_made(partial(_step, work, more)) for name, more in networks.items()}
        yield Case(size.parameters(k=k), peers, wall_clock=True, calls=STEPS)


def _step(work: Workload, more: dict[str, Any]) -> Step:
    network = DiffusionNet(INPUTS, CLASSES, width=work.size.width, blocks=BLOCKS, dropout=0.0, **more).to(work.device)
    training_step = GraphedStep(network, torch.optim.Adam(network.parameters(), lr=1e-3), nn.CrossEntropyLoss())
    training_step.graphs = work.device.type == "cuda"
    (sample,) = work.samples
    conditions = [torch.ones(1, network.condition_channels, device=work.device)] if network.condition_channels else []

    def step() -> Tensor:
        with work.autocast():
            return training_step(sample.features, sample.operators, sample.labels, *conditions)

    return step
