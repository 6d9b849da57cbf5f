"""The random changes of the meshes in an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from diffnet.data import Sample, TargetsAt, augmented
from diffnet.data.augmentation import turned_targets
from diffnet.geometry import random_rotations
from diffnet.geometry.descriptors import hks_times
from diffnet.geometry.store.transfer import aligned
from diffnet.train.options import TrainOptions
from diffnet.train.options.sides import NO_SIDES
from diffnet.train.tasks.classes import numbers_on

T = TypeVar("T")

MESH_SHARE = 1 / 3  # probability that an epoch uses a mesh itself, and not one of its variants


@dataclass(frozen=True)
class Changes:
    """The random changes of the meshes of an epoch, in the order of the training. None if a change is not made.

    rotations: (N, 3, 3), which the training step applies to vectors among the features. Operators stay, so vectors that
        a network gives in their frames stay, too. Targets of the head in space turn.
    mirror: (N,) bool, factors: (N,), times and mirrored_classes, see `augmented`
    """

    options: TrainOptions
    labels_at: TargetsAt
    rotations: Tensor | None
    mirror: Tensor | None
    factors: Tensor | None
    times: Tensor | None
    mirrored_classes: Tensor | None

    def taken(self, numbers: Sequence[int]) -> Changes:
        """The changes of some meshes, in another order."""
        rows = torch.tensor(numbers)

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows.to(values.device)]

        return replace(self, rotations=of(self.rotations), mirror=of(self.mirror), factors=of(self.factors))

    def rotations_of(self, first: int, count: int) -> Tensor | None:
        """The rotations of `count` meshes from number `first` on."""
        return None if self.rotations is None else aligned(self.rotations[first : first + count])

    def made(self, sample: Sample, first: int) -> Sample:
        """The sample, on the device, with all changes but those of its features by rotations.

        Its first mesh has the number `first`.
        """
        options, jitter, rows = self.options, None, slice(first, first + len(sample.operators))
        if options.jitter > 0:
            jitter = options.jitter * torch.randn(len(sample.features), 3, device=sample.features.device)
        if not (jitter is None and self.mirror is None and self.factors is None):
            sample = augmented(
                sample,
                options.features,
                jitter=jitter,
                mirror=None if self.mirror is None else self.mirror[rows],
                factors=None if self.factors is None else self.factors[rows],
                times=self.times,
                mirrored_classes=self.mirrored_classes,
                labels_at=self.labels_at,
                vectors=options.vectors,
                lengths=options.lengths,
            )
        rotations = self.rotations_of(first, len(sample.operators))
        if rotations is None or options.vector_head == "surface" or not options.vectors:
            return sample
        targets = turned_targets(sample.labels, options.vectors, rotations, sample.operators, self.labels_at)
        return replace(sample, labels=targets)


def draw_changes(count: int, options: TrainOptions, device: torch.device, labels_at: TargetsAt = "vertices") -> Changes:
    """Draw the changes of `count` meshes from the global generators.

    labels_at: where the labels of the samples are

    Drawing and moving those of all meshes at once takes as long as those of one step.
    """
    axis = {"x": 0, "y": 1, "z": 2}.get(options.rotate_about)
    rotations = random_rotations(count, axis=axis).to(device) if options.rotates else None
    mirror = (torch.rand(count) < 0.5).to(device) if options.mirror else None
    factors = times = None
    if options.scale_range > 1:
        factors = torch.exp(math.log(options.scale_range) * (2 * torch.rand(count) - 1)).to(device)
        times = hks_times(device=device)
    classes = None
    if options.mirror_labels not in (None, NO_SIDES):
        classes = numbers_on(device, options.mirror_labels, torch.int64)
    return Changes(options, labels_at, rotations, mirror, factors, times, classes)


def draw_variants(groups: Sequence[Sequence[T]]) -> list[T]:
    """Draw one of each group: the mesh itself, which is the first, with probability MESH_SHARE, or else a variant."""
    if all(len(group) == 1 for group in groups):
        return [group[0] for group in groups]
    whole = torch.rand(len(groups)) < MESH_SHARE
    shares = torch.rand(len(groups), dtype=torch.float64)
    return [group[0] if whole[i] else group[1 + int(shares[i] * (len(group) - 1))] for i, group in enumerate(groups)]
