"""`Task`: the methods in which tasks differ. Everything else of a run is shared."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from diffnet.data import (
    ArrayStatistics,
    DataError,
    LabeledMesh,
    LabeledMeshes,
    LabelsAt,
    MeshPairs,
    PairedMeshes,
    PairSample,
    Sample,
    Statistics,
    TargetsAt,
    with_columns,
    with_label_names,
    with_labels_at,
    without_classes,
)
from diffnet.data.conversion import labels_on_surface, rows_of_file
from diffnet.data.folders.files import listing
from diffnet.data.labeled import PlaceAt, counted
from diffnet.data.places import changed_rows
from diffnet.geometry import Mesh, Operators
from diffnet.geometry.elements.elements import on_triangles
from diffnet.geometry.errors import DiffnetError, OptionError
from diffnet.geometry.files import csv_text, full_number, write_atomically
from diffnet.geometry.mesh.attributes import beside, properties_of
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.geometry.mesh.vtk import VtkArrays, vtp_bytes
from diffnet.train.device import matmul_dtype
from diffnet.train.metrics import scores_a_test, spread_over
from diffnet.train.options import TrainOptions
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import SetOptions

if TYPE_CHECKING:
    from diffnet.train.report.report import Chart, Prediction

PICTURE_SIZE = (600, 600)  # width and height of the picture of one mesh, in pixels
SHOWN_MESHES, SHOWN_WHOLE = 8, 60  # on the page of predictions; the latter with targets for whole meshes


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
    condition_statistics: of the conditions, which `condition_names` of the options name. None without them.
    train_meshes: a hash of each mesh of the training part, see `contents_of`, or None if they aren't known
    label_numbers: the number of each class in label files. If these are not known, the names if all are whole numbers,
        else 0, 1, …
    label_colors: see `LabeledMeshes`
    """

    options: TrainOptions
    normalize: bool
    label_names: list[str]
    labels_at: TargetsAt
    statistics: Statistics
    target_statistics: ArrayStatistics | None = None
    train_meshes: frozenset[str] | None = None
    label_numbers: tuple[int, ...] = ()
    condition_statistics: ArrayStatistics | None = None
    label_colors: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Predicted(NamedTuple):
    """The prediction of one mesh without labels.

    values: the result of `Task.predict`, on the CPU. Targets of a regression are in their own units, (N, C) float64.
    probabilities: (N, C) float32 on the CPU, or None if they were not asked for
    instances: (N,) int64, see `label_instances`, or None
    """

    mesh: Mesh
    values: Tensor
    probabilities: Tensor | None = None
    instances: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Scored:
    """Labeled meshes with their predictions.

    predictions: for each mesh, the result of `Task.to_score`, on the CPU. Those of a regression are in the units of the
        targets, (N, C) float64. Predictions at faces are those of the faces of the file.
    options: those of the run or of the network
    teeth: the FDI number of each class, if the scores of teeth are wanted, see `teeth_scores`
    """

    meshes: Sequence[LabeledMesh]
    predictions: Sequence[Tensor]
    label_names: list[str]
    labels_at: TargetsAt
    options: TrainOptions
    teeth: tuple[int, ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # in a pass over all meshes

    def cases(self) -> Iterator[tuple[LabeledMesh, NDArray[Any]]]:
        """Each mesh with its labels or targets at the rows of its predictions. Meshes are read one after another."""
        for item in self.meshes:
            yield item, rows_of_file(item.mesh, item.labels, self.labels_at)

    @property
    def of_meshes(self) -> list[bool]:
        """Which of the columns are targets of whole meshes."""
        at = self.labels_at
        return [place == "meshes" for place in (at if isinstance(at, tuple) else [at] * len(self.label_names))]


class Fields(NamedTuple):
    """A prediction as values that pictures and pages show.

    values: arrays (N,) by name, at the elements `at`, or colors (N, 3)
    """

    kind: Literal["labels", "scalars", "colors"]
    at: LabelsAt
    values: dict[str, NDArray[Any]]


def titles_of(meshes: Sequence[Mesh]) -> list[str]:
    """The names of meshes without folders and extensions. If two of these are equal, the whole names."""
    stems = [mesh_stem(mesh.name) for mesh in meshes]
    return stems if len(set(stems)) == len(stems) else [mesh.name for mesh in meshes]


def write_vtp(file: Path, mesh: Mesh, arrays: Mapping[PlaceAt, Mapping[str, NDArray[Any]]]) -> None:
    """Write a mesh as a VTP file with arrays (N,) or (N, C), and with those of its own file.

    arrays: by name, at "vertices", at "faces" and of the whole mesh ("meshes")
    """
    before = properties_of(mesh)
    tables: dict[PlaceAt, Any] = {"vertices": before.vertices, "faces": before.faces, "meshes": before.fields}
    content = VtkArrays(*(beside(arrays.get(place, {}), each) for place, each in tables.items()))
    sizes, corners = mesh.sizes, mesh.corners
    if sizes is None or corners is None:
        sizes, corners = np.full(len(mesh.faces), 3), mesh.faces.reshape(-1)
    write_atomically(file, vtp_bytes(mesh.verts, sizes, corners, content))


def write_views(
    meshes: Sequence[Mesh],
    html: Path | None,
    png: Path | None,
    heading: str,
    fields: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    titles: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Write a page and a picture of meshes, if they have paths.

    fields: values by name for each mesh, of which the picture shows the first
    titles: by default `titles_of`, and none in a picture of one mesh
    options: more arguments of `viz.page` and `viz.picture`
    """
    from diffnet.viz import page, picture
    from diffnet.viz.render import png_bytes

    options[kind] = fields
    if html is not None:
        page(list(meshes), titles=titles or titles_of(meshes), heading=heading, **options).save(html)
    if png is not None:
        first = next(iter(fields[0]))
        options[kind] = [{first: each[first]} for each in fields]
        several = titles_of(meshes) if len(meshes) > 1 else None
        drawn = picture(list(meshes), titles=titles or several, size=PICTURE_SIZE, **options)
        write_atomically(png, png_bytes(drawn.pixels))


class ReportParts(NamedTuple):
    """What a report has besides scores. rows: of `Task.per_mesh`. curves: the content of curves.png, or None"""

    out: Path
    rows: list[list[Any]]
    summary: Mapping[str, str]
    curves: bytes | None = None


Part: TypeAlias = Literal["train", "test"]
AnySample: TypeAlias = Sample | PairSample
D = TypeVar("D", bound=LabeledMeshes)
S = TypeVar("S")


class Task(ABC, Generic[D, S]):
    """One task, on data sets D and with scored predictions S. Those on single meshes are a `MeshTask`.

    N is the number of vertices, faces, edges, meshes or pairs of a batch, and C the number of outputs of the network.
    Methods of tensors run inside CUDA graphs, so they never wait for the GPU.

    targets_at: the elements that may have targets
    report_files: files of a report besides predictions.html, some of which may be missing
    standardized: whether the targets are numbers. The network then learns standardized ones, see `target_statistics`.
    meshes_of_sample: the number of meshes in each sample
    term: a further term of the loss, see `run_training`, or None
    no_classes: why `predict_labels` refuses a network of this task, or None if it predicts classes
    """

    name: TaskName
    targets_at: tuple[PlaceAt, ...]
    report_files: tuple[str, ...]
    standardized: bool = False
    no_classes: str | None = None
    term: Callable[[Tensor, Tensor], Tensor] | None = None
    meshes_of_sample: int = 1

    @abstractmethod
    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> D:
        """The data set in a folder, in a table or with the name of a generated one, whose meshes may be read later.

        data: the arguments of --data. Only some tasks take several, see `TaskOptions`.
        """

    def adapted(self, data: D, options: TrainOptions, choices: Set[str]) -> TrainOptions:
        """The options of a new run on a set. choices: the names of the options that the user chose, which stay"""
        return options

    @abstractmethod
    def test_set(self, data: LabeledMeshes | MeshPairs, network: NetworkInput) -> D:
        """The test part of a data set as a network takes it."""

    def size(self, data: D) -> str:
        """The number of meshes or pairs to test, for messages."""
        return counted(len(data.test), "mesh", "meshes")

    @abstractmethod
    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[D, TrainOptions]:
        """A data set and options as a run takes them, for options that depend on the data. Raises OptionError."""

    def check(self, data: D, options: TrainOptions) -> None:
        """Raises OptionError for data that can't be trained on with these options. A resumed run isn't checked."""

    @abstractmethod
    def described(self, data: D, jobs: int | None) -> list[tuple[str, str]]:
        """What the summary of a set says of its targets: titles and texts. jobs: see `remembered`"""

    def pairs(self, data: D) -> bytes:
        """By what a resumed run recognizes the pairs of the meshes, or nothing if there are none."""
        return b""

    def samples(self, data: D, part: Part, meshes: Sequence[Sample], options: TrainOptions) -> Sequence[AnySample]:
        """The samples of a part, from its preprocessed meshes."""
        return meshes

    def basis_dtype(self, options: TrainOptions, device: torch.device) -> torch.dtype:
        """The dtype of the basis on a GPU."""
        return matmul_dtype(options.precision, device)

    def from_network(self, outputs: Tensor, operators: Operators, options: TrainOptions) -> Tensor:
        """The outputs (N, …) that the other methods take, from those of the network."""
        return outputs

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
        """The loss ()."""

    @abstractmethod
    def loss_weight(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        """A function of the targets that gives what the loss of a batch divides by, (). It is 0 if nothing counts.

        Raises OptionError for a loss that is no mean over the parts of a batch, which can't be computed in parts.
        """

    def counted(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        """A function of the targets that gives the weight of a batch in the mean loss of an epoch, ()."""
        return self.loss_weight(options)

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """The predictions (N, …)."""

    def to_score(self, outputs: Tensor, options: TrainOptions) -> Tensor:
        """What scores and reports take, if it is more than `predict` gives."""
        return self.predict(outputs)

    @abstractmethod
    def new_tally(self, channels: int, device: torch.device, options: TrainOptions) -> Tensor:
        """A tally of nothing, for C channels."""

    @abstractmethod
    def tally(self, predictions: Tensor, targets: Tensor, channels: int, options: TrainOptions) -> Tensor:
        """A tensor whose sum over batches gives the score. predictions: the result of `to_score`"""

    @abstractmethod
    def score(self, tally: Tensor, options: TrainOptions) -> float:
        """The score in metrics.csv. The higher, the better."""

    @abstractmethod
    def score_name(self, options: TrainOptions) -> str:
        """The name of the score in metrics.csv."""

    @abstractmethod
    def scored(self, data: D, predictions: Sequence[Tensor], samples: Sequence[Any], **where: Any) -> S:
        """The test part of a data set with its predictions.

        predictions: for each sample, the result of `to_score`, on the CPU, in the units of the targets
        where: more arguments of `score_pairs`
        """

    @abstractmethod
    def results(self, scored: S) -> dict[str, Any]:
        """The entries of results.json about the test meshes. Numbers are null if no element is labeled."""

    @abstractmethod
    def per_mesh(self, scored: S, results: dict[str, Any]) -> list[list[Any]]:
        """The rows of per_mesh.csv, with a header: the scores of each mesh or pair. results: of `results`"""

    @abstractmethod
    def summary(self, results: dict[str, Any]) -> tuple[Table, str]:
        """The content of results.json as a table and a line for the console."""

    def map_writer(self, data: LabeledMeshes, folder: Path, form: str) -> Callable[[S], None]:
        """A function that writes the maps of scored pairs. Raises OptionError if they would replace a file."""
        raise OptionError("save_maps is for correspondence")

    @abstractmethod
    def write_report(self, scored: S, results: dict[str, Any], parts: ReportParts) -> None:
        """Write predictions.html and `report_files`."""

    def allows(self, at: TargetsAt) -> bool:
        """Whether targets may be there. Only numbers may be at several places, and then not at edges."""
        several = {*self.targets_at} - {"edges"} if self.standardized else set[str]()
        return {*at} <= several if isinstance(at, tuple) else at in self.targets_at

    def on_meshes(self) -> MeshTask:
        """The task, if it predicts for single meshes. Raises OptionError otherwise."""
        raise OptionError(
            f"the network is for {self.name}, so it computes features and no labels; `diffnet match` uses them"
        )


class MeshTask(Task[LabeledMeshes, Scored]):
    """A task with a target for each element of a mesh, or for each mesh.

    heading: of pages with predictions
    """

    heading: str

    def test_set(self, data: LabeledMeshes | MeshPairs, network: NetworkInput) -> LabeledMeshes:
        if isinstance(data, (MeshPairs, PairedMeshes)):
            raise MetadataError(f"the network is for {self.name}; pairs need one for correspondence")
        data = replace(data, train=[])
        if network.labels_at == "meshes" or data.labels_at == "meshes" or self.standardized:
            if data.labels_at != network.labels_at:
                at = network.labels_at
                raise DataError(f"the labels are at {data.labels_at}, and the network predicts those at {at}")
        else:
            data = with_labels_at(data, cast(LabelsAt, network.labels_at))
        data = labels_on_surface(data, network.options.preprocessing.normalize, network.options.features)
        match_by_name = with_columns if self.standardized else with_label_names
        numbers, own = (dict(zip(each.label_names, each.label_numbers or (), strict=False)) for each in (data, network))
        if other := next((name for name in numbers if own.get(name, numbers[name]) != numbers[name]), None):
            warnings.warn(
                f"labels match by name: {other!r} is {numbers[other]} in these label files, and {own[other]} in those "
                "of the training. If both number their classes alike, write a line into label_names.txt for each "
                "number from 0, and any name for the numbers without a class",
                stacklevel=2,
            )
        return match_by_name(without_classes(data, network.options.ignore), network.label_names)

    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
        if isinstance(data, PairedMeshes):
            raise OptionError(f"{self.name} does not take pairs of meshes")
        if [*data.condition_names] != options.condition_names:
            names = listing(data.condition_names) or "none"
            raise OptionError(f"conditions is {options.conditions}, and those of the set are {names}")
        return labels_on_surface(data, options.preprocessing.normalize, options.features), options

    def scored(
        self, data: LabeledMeshes, predictions: Sequence[Tensor], samples: Sequence[Any], **where: Any
    ) -> Scored:
        return Scored(data.test, predictions, data.label_names, data.labels_at, where["options"])

    def on_meshes(self) -> MeshTask:
        return self

    @abstractmethod
    def worst_first(self, scored: Scored) -> list[int]:
        """The meshes by their scores, the worst first."""

    def shown(self, scored: Scored) -> list[int]:
        """The meshes on the page of predictions, from the worst one to the best."""
        return spread_over(self.worst_first(scored), SHOWN_WHOLE if scored.labels_at == "meshes" else SHOWN_MESHES)

    def write_page(
        self,
        scored: Scored,
        results: dict[str, Any],
        parts: ReportParts,
        title: str,
        table: str,
        charts: Iterable[Chart],
        section: Callable[[Prediction], str],
    ) -> None:
        """Write predictions.html.

        title: how it begins. table: the scores of classes or columns. section: the HTML of a mesh
        """
        from diffnet.train.report import report  # loads Matplotlib, which takes half a second

        meshes = [parts.rows[0], *(parts.rows[1 + i] for i in self.worst_first(scored))]
        shown = report.meshes_html(self.reported(scored, self.shown(scored)), section, scored.labels_at)
        title += " test meshes" if scores_a_test(results) else " scored meshes"
        sections = [table, report.charts_html(charts), report.mesh_table_html(meshes), shown]
        report.write_page(parts.out / "predictions.html", title, parts.summary, sections)

    def reported_values(self, predictions: Tensor) -> Tensor:
        """What a page shows of the result of `to_score`."""
        return predictions

    def reported(self, scored: Scored, numbers: Iterable[int]) -> Iterator[Prediction]:
        """Some predictions as a page shows them. Meshes are read one after another."""
        from diffnet.train.report.report import Prediction  # loads Matplotlib, which takes half a second

        for i in numbers:
            item, values = scored.meshes[i], self.reported_values(scored.predictions[i]).numpy()
            values = changed_rows(values, len(item.mesh.verts), scored.labels_at, partial(on_triangles, item.mesh))
            truth = np.asarray(item.labels, np.float64) if self.standardized else item.labels
            yield Prediction(item.name, item.mesh, values, truth)

    def formats(self, at: TargetsAt) -> tuple[str, ...]:
        """The extensions of the files that `diffnet predict` writes, one for each mesh, and the default first.

        Empty if it writes one table (.csv) of all meshes.
        """
        return ()

    def table(self, predictions: Sequence[Predicted], network: NetworkInput) -> list[list[str]]:
        """The header and the rows of the table of all meshes, by default with the predicted numbers."""
        rows = [[one.mesh.name, *map(full_number, one.values.flatten().tolist())] for one in predictions]
        return [["file", *network.label_names], *rows]

    def write_file(self, file: Path, predicted: Predicted, network: NetworkInput) -> None:
        """Write the prediction of one mesh in the format of the file's extension."""
        write_atomically(file, csv_text(self.table([predicted], network)))

    @abstractmethod
    def fields(self, predicted: Predicted, network: NetworkInput) -> Fields:
        """The prediction as values on its mesh. A prediction for the whole mesh is repeated at the vertices."""

    def titles(self, predictions: Sequence[Predicted], network: NetworkInput) -> list[str] | None:
        """The titles of meshes on a page and in a picture, see `write_views`."""
        return None

    def write_views(
        self, predictions: Sequence[Predicted], network: NetworkInput, html: Path | None, png: Path | None
    ) -> None:
        """Write a page and a picture."""
        fields = [self.fields(predicted, network) for predicted in predictions]
        write_views(
            [predicted.mesh for predicted in predictions],
            html,
            png,
            self.heading,
            [each.values for each in fields],
            kind=fields[0].kind,
            at=fields[0].at,
            titles=self.titles(predictions, network),
            **({} if self.standardized else {"label_names": network.label_names}),
        )


def task_named(name: TaskName) -> Task[Any, Any]:
    """The task of this name, which is `TASK` in its file."""
    return import_module(f"diffnet.train.tasks.{name}").TASK
