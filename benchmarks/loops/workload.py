"""The meshes that the loops of a benchmark pass through, and the networks that they call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffnet import DiffusionNet, collate
from diffnet.benchmarks.harness.sweep import Size
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.original.network import OriginalMesh, original_meshes
from diffnet.data import Sample
from diffnet.geometry import random_rotations, rotate
from diffnet.ops import Backend

BLOCKS, INPUTS, CLASSES = 4, 16, 8


@dataclass(frozen=True)
class Workload:
    """The meshes of a loop, on its device.

    samples: the meshes, with operators as `collate([precompute(path)]).to(device)` returns them
    batch: meshes per step
    rotates: whether each step rotates the features, which are then positions, at random
    shared: whether all peers use the same operators, prepared beforehand. Otherwise each peer prepares its own, and its
        memory includes them.
    """

    size: Size
    samples: tuple[Sample, ...]
    batch: int = 1
    rotates: bool = False
    shared: bool = False

    @property
    def device(self) -> torch.device:
        return self.size.device

    @property
    def steps(self) -> int:
        """Steps per pass over the meshes."""
        return len(self.samples) // self.batch

    @property
    def inputs(self) -> int:
        return self.samples[0].features.shape[1]

    def network(self, backend: Backend) -> DiffusionNet:
        """A network of 4 blocks, in training mode."""
        return DiffusionNet(self.inputs, CLASSES, width=self.size.width, blocks=BLOCKS, backend=backend).to(self.device)

    def order(self) -> Iterator[list[int]]:
        """The batches of an endless loop. Each pass shuffles the meshes. All loops have the same order."""
        shuffled, generator = list(range(len(self.samples))), random.Random(0)
        while True:
            generator.shuffle(shuffled)
            for i in range(self.steps):
                yield shuffled[i * self.batch : (i + 1) * self.batch]

    def samples_of_a_peer(self) -> list[Sample]:
        if self.shared:
            return list(self.samples)
        return [replace(s, operators=replace(s.operators)) for s in self.samples]  # a copy has nothing prepared

    def plain_samples(self) -> list[Sample]:
        """The samples with operators that are prepared for plain PyTorch. On the CPU, nothing is prepared."""
        if self.device.type == "cpu":
            return self.samples_of_a_peer()
        dtype = self.size.storage
        return [replace(s, operators=s.operators.with_gradient_evecs().with_basis_dtype(dtype)) for s in self.samples]

    @cached_property
    def original_meshes(self) -> list[OriginalMesh]:
        return [mesh for s in self.samples for mesh in original_meshes(s.operators)]

    def features(self, sample: Sample) -> Tensor:
        """The features of a batch, rotated at random if the loop rotates."""
        if not self.rotates:
            return sample.features
        return rotate(sample.features, self.rotations(len(sample.operators)), sample.operators.ptr)

    def rotations(self, count: int) -> Tensor:
        return random_rotations(count).to(self.device)

    def autocast(self) -> torch.autocast:
        """Autocast to the storage dtype."""
        dtype = self.size.storage
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def forward(self, network: Callable[..., Tensor], sample: Sample) -> Tensor:
        """The outputs of a network, under autocast."""
        with self.autocast():
            return network(self.features(sample), sample.operators)


def one_mesh(size: Size, k: int) -> Workload:
    """A loop over one mesh."""
    return Workload(size, (_sample(size.vertices, k, size.device),))


def mixed_meshes(size: Size, k: int, count: int, **options: Any) -> Workload:
    """A loop over meshes of evenly spaced sizes, from a tenth of the size's vertices to all of them."""
    smallest = max(9, size.vertices // 10)  # smaller synthetic meshes have no 7 neighbors
    spacing = (size.vertices - smallest) / max(1, count - 1)
    channels = 3 if options.get("rotates") else INPUTS
    samples = tuple(_sample(round(smallest + i * spacing), k, size.device, channels) for i in range(count))
    if size.device.type == "cuda":
        for sample in samples:
            sample.operators.prepared(size.storage)
    return Workload(size, samples, shared=True, **options)


def _sample(v: int, k: int, device: torch.device, channels: int = INPUTS) -> Sample:
    operators = replace(synthetic_operators(v, k, device), gradient_evecs=None)
    return Sample(
        (f"mesh of {v} vertices",),
        torch.randn(v, channels, device=device),
        torch.randint(CLASSES, (v,), device=device),
        collate([operators]).to(device),
    )
