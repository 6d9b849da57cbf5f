"""Segmentation: a label for each vertex, face or edge."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffnet.data import UNLABELED, LabeledMeshes, LabelsAt, TargetsAt, index_dataset, with_labels_at
from diffnet.data.folders.sources import holds_labels
from diffnet.data.numbers import text_of
from diffnet.geometry import Mesh, element_areas
from diffnet.geometry.files import csv_text, npy_bytes, write_atomically
from diffnet.geometry.mesh.attributes import properties_of
from diffnet.geometry.mesh.cortex import values_bytes
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix
from diffnet.train.metrics import class_mean, mean_score, number_or_none, soft_accuracy
from diffnet.train.options import TrainOptions
from diffnet.train.options.labels import RANKED, segmentation_rate
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.labels import TEETH, LabelTask, score_cells
from diffnet.train.tasks.task import Fields, NetworkInput, Predicted, Scored, write_vtp


def _write_mesh(file: Path, predicted: Predicted, network: NetworkInput) -> None:
    """Write a PLY or a VTP file with the labels, the instances and the probabilities, and with what the mesh had."""
    from diffnet.viz.ply import ply_names, write_ply

    mesh, classes, instances = predicted.mesh, predicted.values.numpy(), predicted.instances
    names, numbers, at = network.label_names, network.label_numbers, cast(LabelsAt, network.labels_at)
    shares = dict[str, NDArray[Any]]()
    if predicted.probabilities is not None and at != "edges":
        columns = predicted.probabilities.numpy().T
        shares = {f"probability_{name}": column for name, column in zip(names, columns, strict=True)}
    if file.suffix.lower() == ".ply":
        scalars = dict(zip(ply_names([*shares]), shares.values(), strict=True))
        labels: dict[str, Any] = {"labels": classes, "label_names": names, "label_numbers": numbers}
        more = properties_of(mesh)
        write_ply(file, mesh, **labels, instances=instances, scalars=scalars, at=at, attributes=more)
        return
    arrays: dict[str, NDArray[Any]] = {"label": np.array([*numbers, UNLABELED], np.int64)[classes]}
    arrays |= {} if instances is None else {"instance": instances}
    lines = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
    write_vtp(file, mesh, {at: arrays | shares, "meshes": {"label_names": np.array(lines)}})


def _json_of_labels(file: Path) -> Any:
    """The content of a JSON file with labels, or an empty object for another file."""
    return json.loads(text_of(file)) if mesh_suffix(file) == ".json" and holds_labels(file) else {}


def _json_text(mesh: Mesh, labels: list[int], instances: NDArray[np.int64] | None, at: TargetsAt) -> str:
    """Labels in the form of the file beside the mesh, with what it says of the whole mesh, such as `jaw`."""
    names = [] if mesh.path is None else [f"{mesh_stem(mesh.path)}.json{end}" for end in ("", ".gz")]
    beside = (Path(str(mesh.path)).with_name(name) for name in names)
    before: Any = next((_json_of_labels(file) for file in beside if file.is_file()), {})
    if isinstance(before, list) and instances is None:
        return json.dumps(labels)
    entries = {} if isinstance(before, list) else before
    name = "sub_labels" if at == "faces" and "sub_labels" in entries and "labels" not in entries else "labels"
    more = {} if instances is None else {"instances": instances.tolist()}
    of_mesh = {key: value for key, value in entries.items() if not isinstance(value, list)}
    return json.dumps({**of_mesh, name: labels, **more})


def class_colors(network: NetworkInput) -> NDArray[np.uint8]:
    """A color (C, 3) for each class: that of the training files, or another one if they have none, or use it twice."""
    from diffnet.viz.palette import DISTINCT, label_colors

    black = (0, 0, 0)  # no label, in annotations
    colors = [tuple(network.label_colors.get(name, black)) for name in network.label_names]
    others = iter([color for color in map(tuple, label_colors(DISTINCT).tolist()) if color not in colors])
    used: set[tuple[int, ...]] = {black}
    for i, color in enumerate(colors):
        if color in used:
            colors[i] = next(others, color)
        used.add(color)
    return np.array(colors, np.uint8)


def _soft_results(scored: Scored) -> dict[str, float]:
    """The score by soft labels, if the meshes have them. Unlabeled elements don't count."""
    shares = []
    for item, predicted in zip(scored.meshes, scored.predictions, strict=True):
        if item.accepted is None:
            return {}
        areas = np.where(item.labels >= 0, element_areas(item.mesh, cast(LabelsAt, scored.labels_at)), 0)
        shares.append(soft_accuracy(TASK.classes_of(predicted), item.accepted, areas))
    mean = mean_score(np.array(shares))
    return {} if math.isnan(mean) else {"soft_accuracy": mean}


def _teeth(scored: Scored) -> list[Sequence[float]]:
    """The scores of the teeth of each mesh, if they are wanted. Teeth of the truth may be numbered in a JSON file."""
    from diffnet.train.tasks.teeth import teeth_scores  # training needs no optimizer of SciPy

    if scored.teeth and "teeth" not in scored.memo:
        numbers, each = np.array([*scored.teeth, 0]), list[Sequence[float]]()
        for (item, truth), predicted in zip(scored.cases(), scored.predictions, strict=True):
            content = {} if item.label_file is None else _json_of_labels(item.label_file)
            single = content.get("instances") if isinstance(content, dict) else None
            single = single if isinstance(single, list) and len(single) == len(truth) else None
            each.append(teeth_scores(item.mesh.verts, numbers[truth], numbers[TASK.classes_of(predicted)], single))
        scored.memo["teeth"] = each
    return scored.memo.get("teeth", [])  # type: ignore[no-any-return]


class Segmentation(LabelTask):
    """A class for each element of a mesh."""

    name = "segmentation"
    heading = "Predicted segmentation"
    targets_at = ("vertices", "faces", "edges")

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> LabeledMeshes:
        meshes = index_dataset(data[0], how.cache, how.layout, labels=how.labels, **how.for_index())
        return meshes if how.outputs_at is None else with_labels_at(meshes, how.outputs_at)

    def adapted(self, data: LabeledMeshes, options: TrainOptions, chosen: Set[str]) -> TrainOptions:
        if "learning_rate" in chosen or options.batch_meshes is None:
            return options
        meshes = len(data.train) * (1 - options.validation)
        steps = options.epochs * math.ceil(meshes / options.batch_meshes)
        return replace(options, learning_rate=segmentation_rate(steps))

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def to_score(self, outputs: Tensor, options: TrainOptions) -> Tensor:
        """The logits (N, C) float32 if they rank elements: of two classes, or for a score of rankings."""
        return outputs.float() if options.score in RANKED or outputs.shape[-1] == 2 else self.predict(outputs)

    def reported_values(self, predictions: Tensor) -> Tensor:
        return self.classes_of(predictions)

    def logits_of(self, predictions: Tensor) -> Tensor | None:
        return predictions if predictions.is_floating_point() else None

    def further_results(self, scored: Scored) -> dict[str, Any]:
        matrix = self.read(scored)["matrix"]
        columns = np.array(_teeth(scored)).T if scored.teeth else ()
        teeth = {name: number_or_none(mean_score(each)) for name, each in zip(TEETH, columns, strict=False)}
        return {"mean_iou": class_mean("iou", matrix) if matrix.any() else None, **_soft_results(scored), **teeth}

    def per_mesh(self, scored: Scored, results: dict[str, Any]) -> list[list[Any]]:
        rows = super().per_mesh(scored, results)
        if not scored.teeth:
            return rows
        return [[*row, *more] for row, more in zip(rows, [TEETH, *map(score_cells, _teeth(scored))], strict=True)]

    def formats(self, at: TargetsAt) -> tuple[str, ...]:
        """A colored mesh, and the forms in which `load_dataset` reads labels at these elements."""
        suffixes = {"vertices": (".json", ".vtp", ".annot", ".label.gii"), "faces": (".seg", ".json", ".vtp")}
        return ".ply", ".txt", ".npy", ".csv", *suffixes.get(str(at), (".eseg",))

    def write_file(self, file: Path, predicted: Predicted, network: NetworkInput) -> None:
        """The labels as the numbers of the training files, the instances, and in meshes the probabilities."""
        mesh, classes, instances = predicted.mesh, predicted.values.numpy(), predicted.instances
        names, numbers = network.label_names, network.label_numbers
        if file.suffix.lower() in (".ply", ".vtp"):
            _write_mesh(file, predicted, network)
            return
        if mesh_suffix(file) in (".annot", ".label.gii"):
            write_atomically(file, values_bytes(mesh_suffix(file), classes, names, class_colors(network)))
            return
        labels = np.array([*numbers, UNLABELED], np.int64)[classes]  # an element without a prediction has class -1
        content: bytes | str
        if file.suffix.lower() == ".npy":
            content = npy_bytes(labels if instances is None else np.stack([labels, instances], axis=1))
        elif file.suffix.lower() == ".json":
            content = _json_text(mesh, labels.tolist(), instances, network.labels_at)
        elif file.suffix.lower() == ".csv":
            columns = [("label", *labels.tolist()), ("name", *([*names, ""][i] for i in classes.tolist()))]
            if instances is not None:
                columns.append(("instance", *instances.tolist()))
            content = csv_text(zip(*columns, strict=True))
        else:
            content = "".join(f"{label}\n" for label in labels.tolist())
        write_atomically(file, content)

    def fields(self, predicted: Predicted, network: NetworkInput) -> Fields:
        return Fields("labels", cast(LabelsAt, network.labels_at), {"prediction": predicted.values.numpy()})


TASK = Segmentation()
