"""The meshes of a set of pairs as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffnet.data.labeled import UNLABELED, LabeledMesh, LabeledMeshes
from diffnet.data.pairs.shapes import MeshPairs, PairShape


@dataclass(frozen=True, repr=False)
class PairedMeshes(LabeledMeshes):
    """The meshes of a set of pairs, whose vertices are unlabeled. See `paired_meshes`.

    label_names: the names of the features that a network computes for matching
    """

    pairs: MeshPairs = field(kw_only=True)


def paired_meshes(pairs: MeshPairs, channels: int) -> PairedMeshes:
    """The data set of a network that computes C features for matching.

    channels: C
    """

    def unlabeled(shapes: Sequence[PairShape]) -> list[LabeledMesh]:
        return [LabeledMesh(s.name, s.mesh, np.full(len(s.mesh.verts), UNLABELED, np.int64)) for s in shapes]

    names = [str(i) for i in range(channels)]
    about: dict[str, Any] = {"source": pairs.source, "left_out": pairs.left_out}
    return PairedMeshes(unlabeled(pairs.train), unlabeled(pairs.test), names, "vertices", pairs=pairs, **about)
