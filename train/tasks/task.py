"""`Task`: the functions in which tasks differ. Everything else of a run is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from diffnet.data import LabeledMesh, LabeledMeshes, TargetsAt
from diffnet.geometry import Mesh
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.names import TaskName


class Predicted(NamedTuple):
    """The prediction of one mesh without labels.

    values: what `Task.predict` returns, on the CPU. Targets of a regression are in their own units, (N, C) float64.
    probabilities: (N, C) float32 on the CPU, or None if nobody asked for them
    """

    mesh: Mesh
    values: Tensor
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """Labeled meshes with their predictions.

    predictions: for each mesh, what `Task.predict` returns, on the CPU. Those of a regression are in the units of the
        targets, (N, C) float64.
    """

    meshes: Sequence[LabeledMesh]
    predictions: Sequence[Tensor]
    label_names: list[str]
    labels_at: TargetsAt


@dataclass(frozen=True)
class Task:
    """One task. N is the number of vertices, faces, edges or meshes of a batch, and C the number of outputs.

    Functions of tensors run inside CUDA graphs, so they never wait for the GPU.

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
