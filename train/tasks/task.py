"""`Task`: the functions in which tasks differ. Everything else of a run is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

from diffnet.data import LabeledMesh, LabeledMeshes, Layout, MeshPairs, PairErrors, PairSample, Sample, TargetsAt
from diffnet.data.pairs.indices import Base
from diffnet.geometry import Mesh, Operators
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.registry import TaskName


class DataOptions(NamedTuple):
    """The options of `diffnet evaluate` for a data set. Each task reads the options of its sets.

    options: those in the metadata of the network, see `NetworkInput`
    layout: see `load_dataset`
    targets: see `load_targets`
    pairs, base: see `load_pairs`
    seed: of the generated set
    """

    options: TrainOptions
    layout: Layout = "auto"
    targets: str | None = None
    pairs: str | None = None
    base: Base = "auto"
    seed: int = 0


class Predicted(NamedTuple):
    """The prediction of one mesh without labels.

    values: the result of `Task.predict`, on the CPU. Targets of a regression are in their own units, (N, C) float64.
    probabilities: (N, C) float32 on the CPU, or None if they were not asked for
    """

    mesh: Mesh
    values: Tensor
    probabilities: Tensor | None = None


class Outputs(NamedTuple):
    """What a network predicts.

    names: of the classes, or of the columns of a regression
    numbers: of the classes in label files, see `NetworkInput`
    at: the elements that it predicts for
    """

    names: list[str]
    numbers: tuple[int, ...]
    at: TargetsAt


@dataclass(frozen=True)
class ScoredPairs:
    """The test pairs of a set with their predicted maps.

    maps: for each test pair, a vertex of its second mesh for each vertex of its first mesh, (V,) int64
    errors: of each test pair; empty if the true correspondences are not known
    """

    data: MeshPairs
    maps: Sequence[NDArray[np.int64]]
    errors: Sequence[PairErrors]


@dataclass(frozen=True)
class Scored:
    """Labeled meshes with their predictions.

    predictions: for each mesh, the result of `Task.predict`, on the CPU. Those of a regression are in the units of the
        targets, (N, C) float64.
    pairs: of a task on pairs, for which `predictions` are functional maps (1, K, K)
    """

    meshes: Sequence[LabeledMesh]
    predictions: Sequence[Tensor]
    label_names: list[str]
    labels_at: TargetsAt
    pairs: ScoredPairs | None = None


@dataclass(frozen=True)
class PairFunctions:
    """The functions that only a task on pairs of meshes has.

    check: (pairs, options) raises OptionError for a set that can't be trained on with these options
    as_labeled: (pairs, C) to their meshes as a data set for a network with C outputs
    samples: (pairs, "train" or "test", the preprocessed meshes of this part, options) to one sample for each pair
    inputs: (network, features (V, C), operators of `collate_pairs`, options) to the features that the network gets
    maps: (features (V, C) of the network, operators of `collate_pairs`, options) to the outputs that the functions of
        `Task` take, one row for each pair of the batch
    score: (pairs, predictions, samples of the test pairs, options, device, cache_dir=, jobs=, console=) to the scores
    """

    check: Callable[[MeshPairs, TrainOptions], None]
    as_labeled: Callable[[MeshPairs, int], LabeledMeshes]
    samples: Callable[[MeshPairs, str, Sequence[Sample], TrainOptions], list[PairSample]]
    inputs: Callable[[nn.Module, Tensor, Operators, TrainOptions], Tensor]
    maps: Callable[[Tensor, Operators, TrainOptions], Tensor]
    score: Callable[..., ScoredPairs]


def titles_of(meshes: Sequence[Mesh]) -> list[str]:
    """The names of meshes without folders and extensions, or with them if these names are not different."""
    stems = [mesh_stem(mesh.name) for mesh in meshes]
    return stems if len(set(stems)) == len(stems) else [mesh.name for mesh in meshes]


def scores_a_test(results: Mapping[str, Any]) -> bool:
    """Whether no scored mesh is a training mesh, from results.json. False if `diffnet evaluate` doesn't know it.

    >>> scores_a_test({"scored_training_meshes": 2}), scores_a_test({})  # {} as in the results of a training run
    (False, True)
    """
    seen: int | None = results.get("scored_training_meshes", 0)
    return seen == 0


def _unchanged(data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
    return data, options


@dataclass(frozen=True)
class Task:
    """One task. N is the number of vertices, faces, edges or meshes of a batch, and C the number of outputs.

    Functions of tensors run inside CUDA graphs, so they never wait for the GPU.

    targets_at: the elements that may have targets
    outputs: the name of one output of the network, and that of several, for messages
    loss: (outputs (N, C), targets, options) to the loss ()
    predict: outputs (N, C) to the predictions that scores and reports take, a tensor of N rows
    new_tally: (C, device) to a tally of nothing
    tally: (predictions, targets, C) to a tensor whose sum over batches gives the score
    score: a tally to the score in metrics.csv. The higher, the better.
    score_name: the name of the score in metrics.csv
    prepared: (data set, options) to both as a run takes them, for options that depend on the data. Raises OptionError.
    check: (data set, options) raises OptionError for data that can't be trained on with these options. A resumed run
        isn't checked.
    load_test: (folder, table or name of the generated set, its `DataOptions`, folder of the cache) to a data set. Its
        training part is not used.
    matched: (data set, label names of a network) to the data set with these classes or columns, matched by name
    results: the entries of results.json about the test meshes; numbers are null if no element is labeled
    summary: results.json to a table and a line for the console
    write_report: (folder, scored meshes, their results, entries of the summary, curves.png or None) writes
        predictions.html and `report_files`
    report_files: other files of a report, some of which may be missing
    formats: elements to the extensions of the files that `diffnet predict` writes, one for each mesh, and the default
        first. Empty if it writes one table (.csv) of all meshes. Raises OptionError if it can't predict.
    write_file: (file, predictions, outputs) writes the prediction of one mesh in the format of the file's extension, or
        the table of all meshes
    write_views: (predictions, outputs, page or None, picture or None)
    standardized: whether the targets are numbers. The network then learns standardized ones, see `target_statistics`.
    pairs: the functions of a task on pairs of meshes. None in other tasks.
    """

    name: TaskName
    targets_at: tuple[TargetsAt, ...]
    outputs: tuple[str, str]
    loss: Callable[[Tensor, Tensor, TrainOptions], Tensor]
    predict: Callable[[Tensor], Tensor]
    new_tally: Callable[[int, torch.device], Tensor]
    tally: Callable[[Tensor, Tensor, int], Tensor]
    score: Callable[[Tensor], float]
    score_name: str
    load_test: Callable[[Path, DataOptions, Path], LabeledMeshes | MeshPairs]
    matched: Callable[[LabeledMeshes, list[str]], LabeledMeshes]
    results: Callable[[Scored], dict[str, Any]]
    summary: Callable[[dict[str, Any]], tuple[Table, str]]
    write_report: Callable[[Path, Scored, dict[str, Any], Mapping[str, str], bytes | None], None]
    report_files: tuple[str, ...]
    formats: Callable[[TargetsAt], tuple[str, ...]]
    write_file: Callable[[Path, Sequence[Predicted], Outputs], None]
    write_views: Callable[[Sequence[Predicted], Outputs, Path | None, Path | None], None]
    prepared: Callable[[LabeledMeshes, TrainOptions], tuple[LabeledMeshes, TrainOptions]] = _unchanged
    check: Callable[[LabeledMeshes, TrainOptions], None] = lambda data, options: None
    standardized: bool = False
    pairs: PairFunctions | None = None
