"""Predictions of a trained network on new meshes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.cuda_graphs import graphed
from diffnet.data import (
    UNLABELED,
    Interpolation,
    LabeledMesh,
    Sample,
    decimated_to_score,
    original_targets,
    own_arrays,
    prepare,
    standardized,
)
from diffnet.data.conversion import all_count, counted_elements, length_factors, rows_of_file
from diffnet.data.places import places_of
from diffnet.data.samples import sample_of
from diffnet.geometry import Mesh, MeshError, MeshLike, label_instances, load_mesh, precompute, smooth_boundaries
from diffnet.geometry.device import usable_device
from diffnet.geometry.elements.elements import file_edges
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import check_several
from diffnet.ops.common.launcher import hash_triton_ahead
from diffnet.train.evaluate import network_outputs
from diffnet.train.inference.network_input import network_input
from diffnet.train.orientation import is_tilted, warn_of_tilted
from diffnet.train.tasks.labels import LabelTask
from diffnet.train.tasks.task import MetadataError, NetworkInput, Predicted, task_named

NO_CONDITIONS: Mapping[str, float] = {}


def predict_labels(
    sources: Sequence[MeshLike],
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None = None,
    conditions: Sequence[Mapping[str, float]] | None = None,
) -> list[tuple[Mesh, NDArray[np.int64]]]:
    """The most likely class of every vertex, face or edge of meshes, or of each mesh, preprocessed as in training.

    network: one of `DiffusionNet.load`, whose metadata say what it takes as input; see `network_input`
    device: where to compute
    cache_dir: a folder that keeps operators, see `precompute`
    conditions: of each mesh, such as {"speed": 30}, for a network that was trained with them

    Meshes are decimated as in training, and labels are those of the full meshes, see `decimated`.

    Returns for each source the mesh at its original positions, and labels (V,), (F,), (E,) or, in classification, (1,),
    int64, which are numbers of output channels, from 0. Faces and edges are those of the file: the outputs of the
    triangles of a polygon are averaged by area. `diffnet.geometry.on_triangles` gives all triangles their labels. A
    vertex of no face has the label −1, and probabilities and values are NaN there. The numbers of the training files,
    which `diffnet predict` writes, are those of `network_input(network).label_numbers`.

    Raises MeshError for a mesh that can't be used, DataError for a mesh without the own arrays that the network was
    trained with, OptionError for a device that is not available, and MetadataError for a network without what is
    needed, and for one of a regression or of a correspondence.
    """
    _check_classes(network)
    predicted = _predictions(sources, network, device, cache_dir, conditions)
    task = cast(LabelTask, task_named(network_input(network).options.task))
    return [(each.mesh, task.classes_of(each.values).numpy()) for each in predicted]


def predict_probabilities(
    sources: Sequence[MeshLike],
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None = None,
    conditions: Sequence[Mapping[str, float]] | None = None,
) -> list[tuple[Mesh, NDArray[np.float32]]]:
    """The probabilities of all classes, (N, C) float32 for each mesh. For the rest, see `predict_labels`."""
    _check_classes(network)
    predicted = _predictions(sources, network, device, cache_dir, conditions, probabilities=True)
    return [(each.mesh, cast(Tensor, each.probabilities).numpy()) for each in predicted]


def predict_values(
    sources: Sequence[MeshLike],
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None = None,
    conditions: Sequence[Mapping[str, float]] | None = None,
) -> list[tuple[Mesh, NDArray[np.float64]]]:
    """The numbers that a network of a regression predicts, (N, C) float64 in the units of its targets.

    N is the number of vertices, faces or edges of a mesh, or 1, or that of the rows of `output_rows`. For the rest, see
    `predict_labels`. Raises MetadataError for a network of another task, and OptionError for other conditions than
    those of the network.
    """
    expected = network_input(network)
    if expected.target_statistics is None:
        task = expected.options.task
        raise MetadataError(f"the network is one of {task}; call predict_labels or predict_probabilities")
    predicted = _predictions(sources, network, device, cache_dir, conditions)
    return [(each.mesh, each.values.numpy()) for each in predicted]


def _check_classes(network: DiffusionNet) -> None:
    """Raises MetadataError for a network without classes."""
    reason = task_named(network_input(network).options.task).no_classes
    if reason is not None:
        raise MetadataError(reason)


def _predictions(
    sources: Sequence[MeshLike],
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None,
    conditions: Sequence[Mapping[str, float]] | None,
    probabilities: bool = False,
) -> list[Predicted]:
    """The predictions for meshes, see `predictor`. Warns of meshes in another orientation."""
    check_several(sources)
    conditions = [NO_CONDITIONS] * len(sources) if conditions is None else conditions
    if len(conditions) != len(sources):
        raise OptionError(f"there should be conditions for each of {len(sources)} meshes, got {len(conditions)}")
    predictions = list(map(predictor(network, device, cache_dir, probabilities), sources, conditions))
    upright = network_input(network).options.upright
    warn_of_tilted([each.mesh.name for each in predictions if is_tilted(each.mesh, upright)])
    return predictions


def predictor(
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None = None,
    probabilities: bool = False,
    smooth: float = 0.0,
    least_area: float | None = None,
    background: int | None = None,
    threshold: float | None = None,
) -> Callable[..., Predicted]:
    """A function of a mesh and its conditions that gives the prediction as the task of a network keeps it.

    See `predict_labels`, and `predict_values` for conditions.

    probabilities: whether to keep the probabilities of all classes, too
    smooth: if above 0, the weight of `smooth_boundaries`, for a segmentation. Probabilities stay as they are.
    threshold: of a segmentation with two classes, the probability from which on an element has the second one
    least_area, background: those of `label_instances`, for a segmentation with instances; no area for none
    """
    expected = network_input(network)
    task, at = task_named(expected.options.task), expected.labels_at
    outputs_of = _outputs(network, device, cache_dir)

    def predicted(source: MeshLike, conditions: Mapping[str, float] = NO_CONDITIONS) -> Predicted:
        mesh, outputs = outputs_of(source, conditions)
        needs_shares = probabilities or smooth > 0 or threshold is not None
        shares = outputs.float().softmax(-1).cpu() if needs_shares else None
        if smooth > 0 and shares is not None and at != "meshes" and isinstance(at, str):
            labels = smooth_boundaries(mesh, shares.nan_to_num(), at=at, weight=smooth)
            values = _where_finite(torch.from_numpy(labels), shares)
        elif threshold is not None and shares is not None:
            values = _where_finite((shares[:, 1] >= threshold).long(), shares)
        else:
            values = _where_finite(task.predict(outputs), outputs).cpu()
        if expected.target_statistics is not None:
            options = expected.options
            factors = length_factors(mesh, options.lengths, options.scale, values.shape[1])
            values = original_targets(values, expected.target_statistics, factors)
        instances = None
        if least_area is not None and at != "meshes" and isinstance(at, str):
            instances, labels = label_instances(
                mesh, values.numpy(), at=at, least_area=least_area, background=background
            )
            values = torch.from_numpy(labels)
        return Predicted(mesh, values, shares if probabilities else None, instances)

    return predicted


def _where_finite(values: Tensor, outputs: Tensor) -> Tensor:
    """Predictions (N, …), where labels are UNLABELED if the outputs (N, C) are NaN."""
    return values if values.is_floating_point() else torch.where(outputs[:, 0].isnan(), UNLABELED, values)


def _outputs(
    network: DiffusionNet, device: torch.device | str, cache_dir: str | os.PathLike[str] | None
) -> Callable[[MeshLike, Mapping[str, float]], tuple[Mesh, Tensor]]:
    """A function of a mesh and its conditions that gives the mesh at its original positions, and the outputs (N, C).

    Outputs are on the device, at the vertices, faces or edges of the mesh file, and NaN where they don't count, see
    `counted_elements`.
    """
    expected, place = network_input(network), usable_device(device)
    if place.type == "cuda":
        hash_triton_ahead()  # while the first mesh is read
    network = graphed(network.to(place))  # once, because the graphs serve all meshes

    def outputs_of(source: MeshLike, conditions: Mapping[str, float]) -> tuple[Mesh, Tensor]:
        mesh = load_mesh(source)
        sample = input_sample(mesh, expected, cache_dir, conditions=conditions, device=place)
        outputs = network_outputs(network, sample, expected.options, place)
        at, options = expected.labels_at, expected.options.preprocessing
        edges = file_edges(mesh) if at == "edges" and mesh.has_polygons else None
        outputs = outputs if edges is None else outputs[torch.from_numpy(edges).to(place)]
        if all_count(at, options.features, options.normalize):
            return mesh, outputs
        inside = rows_of_file(mesh, counted_elements(mesh, at, options.features, options.normalize), at)
        inside = inside if edges is None else inside[edges]
        return mesh, torch.where(torch.from_numpy(inside).to(place)[:, None], outputs, torch.nan)

    return outputs_of


def input_sample(
    mesh: Mesh,
    expected: NetworkInput,
    cache_dir: str | os.PathLike[str] | None = None,
    arrays: Mapping[str, Any] | None = None,
    conditions: Mapping[str, float] = NO_CONDITIONS,
    device: torch.device | str = "cpu",
) -> Sample:
    """A mesh as a network takes it, on the CPU, without labels. A decimated mesh takes its outputs to the full one.

    arrays: own arrays by name, see `own_arrays`
    conditions: of the mesh by name
    device: the device that computes the operators of a large mesh, see `precompute`

    Raises OptionError for other conditions than those of the network, MeshError for a mesh that can't be used, and
    DataError for an own array that can't be used.
    """
    of_faces = [place for place in places_of(expected.labels_at) if place in ("faces", "edges")]
    if mesh.is_point_cloud and of_faces:
        raise MeshError(f"{mesh.name}: the network labels {of_faces[0]}, and a point cloud has none")
    options, statistics = expected.options.preprocessing, expected.statistics
    values, row = own_arrays(mesh, options.features, statistics, arrays), _condition_row(expected, conditions)
    item, at = LabeledMesh(mesh.name, mesh, np.zeros(0, np.int64), values, conditions=row), expected.labels_at
    item, back = decimated_to_score(item, at, expected.options.max_faces, options.features, cache_dir)
    if expected.normalize:
        input_mesh, operators = prepare(item.mesh, options, cache_dir, device)
    else:
        input_mesh = item.mesh
        operators = precompute(input_mesh, **asdict(options.decisive), cache_dir=cache_dir, device=device)
    return sample_of(item, input_mesh, operators.cpu(), options, statistics, Interpolation.to_score(mesh, at, back))


def _condition_row(expected: NetworkInput, conditions: Mapping[str, float]) -> NDArray[Any]:
    """The conditions (C,) of a mesh as a network takes them."""
    names = expected.options.condition_names
    if set(conditions) != set(names) or not all(map(math.isfinite, conditions.values())):
        got = str(dict(conditions) or "none")
        raise OptionError(
            f"the network takes these conditions of a mesh, as numbers: {', '.join(names) or 'none'}; got {got:.200}"
        )
    values = np.array([conditions[name] for name in names], np.float64)
    return values if expected.condition_statistics is None else standardized(values, expected.condition_statistics)
