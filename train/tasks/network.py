"""What a trained network takes as input, and the options of a data set for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diffnet.data import ArrayStatistics, Layout, Statistics, TargetsAt
from diffnet.data.pairs.indices import Base
from diffnet.geometry.errors import DiffnetError
from diffnet.train.options import TrainOptions


class MetadataError(DiffnetError, ValueError):
    """The metadata of a network don't say what it takes as input. The message names what is missing or wrong."""


@dataclass(frozen=True)
class NetworkInput:
    """The input of a network, and the names of its outputs.

    options: holds those that `network_input` reads; its other values are not used
    normalize: whether positions are normalized first, by the rule in `options`
    label_names: the name of each class, or of each column of a regression
    labels_at: what it predicts: classes or numbers of "vertices", "faces", "edges" or "meshes"
    statistics: of the features from files, see `array_statistics`
    target_statistics: of the targets of a regression, whose outputs are standardized. None in other tasks.
    train_meshes: `mesh_hash` of each mesh of the training part, or None if they aren't known
    label_numbers: the number of each class in label files. If these are not known, the names if all are whole numbers,
        else 0, 1, …
    """

    options: TrainOptions
    normalize: bool
    label_names: list[str]
    labels_at: TargetsAt
    statistics: Statistics
    target_statistics: ArrayStatistics | None = None
    train_meshes: frozenset[str] | None = None
    label_numbers: tuple[int, ...] = ()


class DataOptions(NamedTuple):
    """The options of `diffnet evaluate` for a data set. Each task reads the options of its sets.

    layout: see `load_dataset`
    targets: see `load_targets`
    pairs, base: see `load_pairs`
    seed: of the generated set
    jobs: see `index_dataset`
    """

    network: NetworkInput
    layout: Layout = "auto"
    targets: str | None = None
    pairs: str | None = None
    base: Base = "auto"
    seed: int = 0
    jobs: int | None = None
