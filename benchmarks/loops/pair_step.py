"""Training steps on a pair of meshes, by unsupervised functional maps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet import DiffusionNet
from diffnet.benchmarks.cases.functional_maps import TEMPERATURE, K, row_by_row
from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.harness.sweep import Size, sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.loops.peers import Step, train
from diffnet.benchmarks.loops.workload import BLOCKS, INPUTS
from diffnet.benchmarks.original.network import original_meshes, original_network
from diffnet.data import PairSample, Sample, collate_pairs
from diffnet.train.correspondence.maps import unsupervised_loss
from diffnet.train.correspondence.targets import unknown_map
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.correspondence import TASK

FEATURES = 256
STEPS = 5  # per timed run


@benchmark("pair-step", metrics=("ms", "MB"))
def pair_step(options: Options) -> Iterator[Case]:
    """A step of `diffnet train correspondence --method unsupervised` on a pair of meshes, in wall-clock time.

    The network has 4 blocks and 256 features. The peer "published" is the published recipe in eager PyTorch: the
    original's network, functional maps solved row by row with inverse matrices, and soft maps as V × V tables. All
    compute in float32.
    """
    k = options.k or K
    for size in sweep(options, dtypes=("fp32",), widths=(128,), vertices=(5_000,)):
        pair = _pair(size, k)
        peers: dict[str, Run] = {
            "diffnet": first_made(partial(_diffnet, pair, size, k, graphs=size.device.type == "cuda")),
            "diffnet-eager": first_made(partial(_diffnet, pair, size, k, graphs=False)),
            "published": first_made(partial(_published, pair, size, k)),
        }
        yield Case(size.parameters(k=k), peers, wall_clock=True, calls=STEPS)


def _pair(size: Size, k: int) -> PairSample:
    target = unknown_map(k, size.device)
    return PairSample(_mesh("a", size, k), _mesh("b", size, k), lambda: target)


def _mesh(name: str, size: Size, k: int) -> Sample:
    features = torch.randn(size.vertices, INPUTS, device=size.device)
    operators = synthetic_operators(size.vertices, k, size.device)
    return Sample((name,), features, torch.zeros(0, dtype=torch.int64), operators)


def _network(size: Size) -> DiffusionNet:
    return DiffusionNet(INPUTS, FEATURES, width=size.width, blocks=BLOCKS, dropout=0.0).to(size.device)


def _diffnet(pair: PairSample, size: Size, k: int, graphs: bool) -> Step:
    options = TrainOptions(
        task="correspondence",
        method="unsupervised",
        features="wks",
        k=k,
        map_k=k,
        width=size.width,
        learning_rate=1e-3,
        precision="fp32",
    )
    step = TrainingStep(TASK, _network(size), options, size.device)
    if graphs:
        step.capture([pair.operators])
    return lambda: step(collate_pairs([pair]))


def _published(pair: PairSample, size: Size, k: int) -> Step:
    network = _network(size)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    meshes = [mesh for sample in (pair.a, pair.b) for mesh in original_meshes(sample.operators)]
    a, b = pair.a.operators, pair.b.operators
    inverses = [o.evecs.mT * o.mass for o in (a, b)]  # (K, V)

    def loss() -> Tensor:
        features = torch.cat([pair.a.features, pair.b.features])
        x, y = torch.split(original_network(network, features, meshes, [size.vertices] * 2), size.vertices)
        spectra = inverses[0] @ x, inverses[1] @ y
        there = row_by_row(spectra[0][None], spectra[1][None], a.evals, b.evals)
        back = row_by_row(spectra[1][None], spectra[0][None], b.evals, a.evals)
        cosines = F.normalize(y, dim=1) @ F.normalize(x, dim=1).mT / TEMPERATURE
        soft_there = inverses[1] @ (torch.softmax(cosines, 1) @ a.evecs)
        soft_back = inverses[0] @ (torch.softmax(cosines.mT, 1) @ b.evecs)
        return unsupervised_loss(torch.stack([there[0], back[0], soft_back, soft_there])[None])

    return partial(train, optimizer, loss)
