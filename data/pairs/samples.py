"""Two preprocessed meshes as one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffnet.data.samples import Sample, collate_samples
from diffnet.geometry import Operators, collate


@dataclass(frozen=True)
class PairSample:
    """Two meshes a and b. Nothing is packed before `collate_pairs`, so thousands of pairs share their meshes.

    A functional map of the pair takes functions on a to functions on b, and its map of points takes each vertex of b to
    a vertex of a. So b is the first mesh of a pair of `MeshPairs`, and a the second.

    target: computes the true functional map (1, K, K), NaN where it is not known
    """

    a: Sample
    b: Sample
    target: Callable[[], Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return self.a.names + self.b.names

    @property
    def operators(self) -> Operators:
        """The packed operators of a and b. Each call packs them again."""
        return collate([self.a.operators, self.b.operators])


def collate_pairs(pairs: Sequence[PairSample]) -> Sample:
    """Pack pairs into one sample: a and b of the first pair, then of the next one. The labels are the targets."""
    packed = collate_samples([mesh for pair in pairs for mesh in (pair.a, pair.b)])
    return replace(packed, labels=torch.cat([pair.target() for pair in pairs]))
