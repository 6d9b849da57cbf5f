"""The meshes of a set of pairs as a data set, and two preprocessed meshes as one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.data.labeled import UNLABELED, LabeledMesh, LabeledMeshes
from diffnet.data.pairs.shapes import MeshPairs, PairShape
from diffnet.data.samples import Sample, collate_samples
from diffnet.geometry import Operators, collate


@dataclass(frozen=True, repr=False)
class PairedMeshes(LabeledMeshes):
    """The meshes of a set of pairs, whose vertices are unlabeled. See `paired_meshes`.

    label_names: the names of the features that a network computes for matching
    """

    pairs: MeshPairs = field(kw_only=True)


def paired_meshes(pairs: MeshPairs, channels: int, *, partial: bool = False) -> PairedMeshes:
    """The data set of a network that computes C features for matching.

    channels: C
    partial: whether the last output is no feature, but the logit of the overlap of partial shapes
    """

    def meshes_of(shapes: Sequence[PairShape]) -> list[LabeledMesh]:
        return [LabeledMesh(s.name, s.mesh, np.full(len(s.mesh.verts), UNLABELED, np.int64)) for s in shapes]

    names = [str(i) for i in range(channels)]
    if partial:
        names[-1] = "overlap"
    about: dict[str, Any] = {"source": pairs.source, "left_out": pairs.left_out}
    return PairedMeshes(meshes_of(pairs.train), meshes_of(pairs.test), names, "vertices", pairs=pairs, **about)


@dataclass(frozen=True)
class PairSample:
    """Two meshes a and b. Nothing is packed before `collate_pairs`, so thousands of pairs share their meshes.

    A functional map of the pair takes functions on a to functions on b, and its map of points takes each vertex of b to
    a vertex of a. So b is the first mesh of a pair of `MeshPairs`, and a the second.

    target: computes the true functional map (1, K, K), NaN where it is not known; or the targets (V, C) of all vertices
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
    sample = collate_samples([mesh for pair in pairs for mesh in (pair.a, pair.b)])
    return replace(sample, labels=torch.cat([pair.target() for pair in pairs]))
