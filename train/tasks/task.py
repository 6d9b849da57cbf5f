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
from torch import Tensor

from diffnet.data import LabeledMesh, LabeledMeshes, MeshPairs, PairErrors, TargetsAt
from diffnet.geometry import Mesh, Operators
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.names import TaskName


class Predicted(NamedTuple):
    """The prediction of one mesh without labels.

    values: what `Task.predict` returns, on the CPU. Targets of a regression are in their own units, (N, C) float64.
    probabilities: (N, C) float32 on the CPU, or None if they were not asked for
    """

    mesh: Mesh
    values: Tensor
    probabilities: Tensor | None = None


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

    predictions: for each mesh, what `Task.predict` returns, on the CPU. Those of a regression are in the units of the
        targets, (N, C) float64.
    pairs: of a task on pairs, for which `predictions` are functional maps (1, K, K)
    """

    meshes: Sequence[LabeledMesh]
    predictions: Sequence[Tensor]
    label_names: list[str]
    labels_at: TargetsAt
    pairs: ScoredPairs | None = None


@dataclass(frozen=True)
class Task:
    """One task. N is the number of vertices, faces, edges or meshes of a batch, and C the number of outputs.

    Functions of tensors run inside CUDA graphs, so they never wait for the GPU.

    maps: in a task on pairs, (features (V, C) of the network, operators, options) to what the other functions take as
        outputs, one row for each of P pairs. The operators are those of `collate_pairs`. None in other tasks.
    loss: (outputs (N, C), targets, options) to the loss ()
    predict: outputs (N, C) to what is kept of them for scores and reports, a tensor of N rows
    new_tally: (C, device) to a tally of nothing
    tally: (predictions, targets, C) to a tensor whose sum over batches gives the score
    score: a tally to the score in metrics.csv, whose name is in `SCORES`. The higher, the better.
    matched: (data set, label names of a network) to the data set with these classes or columns, matched by name
    results: the entries of results.json about the test meshes; numbers are null if no element is labeled
    summary: results.json to a table and a line for the console
    write_report: (folder, scored meshes, their results, entries of the summary, curves.png or None) writes all other
        files of the report
    output_files: (meshes, --out, elements) to the files that `diffnet predict` writes for these meshes. Raises
        OptionError.
    write_predictions: (predictions, label names, elements, output files, page or None, picture or None)
    """

    name: TaskName
    loss: Callable[[Tensor, Tensor, TrainOptions], Tensor]
    predict: Callable[[Tensor], Tensor]
    new_tally: Callable[[int, torch.device], Tensor]
    tally: Callable[[Tensor, Tensor, int], Tensor]
    score: Callable[[Tensor], float]
    matched: Callable[[LabeledMeshes, list[str]], LabeledMeshes]
    results: Callable[[Scored], dict[str, Any]]
    summary: Callable[[dict[str, Any]], tuple[Table, str]]
    write_report: Callable[[Path, Scored, dict[str, Any], Mapping[str, str], bytes | None], None]
    output_files: Callable[[Sequence[Path], Path, TargetsAt], list[Path]]
    write_predictions: Callable[
        [Sequence[Predicted], list[str], TargetsAt, Sequence[Path], Path | None, Path | None], None
    ]
    maps: Callable[[Tensor, Operators, TrainOptions], Tensor] | None = None
