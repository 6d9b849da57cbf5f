"""Predictions of a trained network on new meshes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet import DiffusionNet
from diffnet.cuda_graphs import graphed
from diffnet.data import LabelsAt, Sample, input_features, own_arrays, prepare
from diffnet.geometry import Mesh, MeshError, MeshLike, load_mesh, precompute
from diffnet.geometry.files import write_atomically
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.train.evaluate import predict_classes
from diffnet.train.network_input import NetworkInput, network_input
from diffnet.viz import page, picture, write_ply
from diffnet.viz.render import png_bytes

PICTURE_SIZE = (600, 600)  # width and height of the picture of one mesh, in pixels


def predict_labels(
    sources: Sequence[MeshLike],
    network: DiffusionNet,
    device: torch.device | str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[tuple[Mesh, NDArray[np.int64]]]:
    """The most likely class of every vertex, face or edge of meshes, preprocessed as in training.

    network: one of `DiffusionNet.load`, whose metadata say what it takes as input; see `network_input`
    device: where to compute
    cache_dir: a folder that keeps operators, see `precompute`

    Returns for each source the mesh at its original positions, and labels (V,), (F,) or (E,) int64, which are numbers
    of output channels.

    Raises MeshError for a mesh that can't be used, DataError for a mesh without the own arrays that the network was
    trained with, and MetadataError for a network without what is needed.
    """
    expected, device = network_input(network), torch.device(device)
    network = graphed(network.to(device))
    results = []
    for source in sources:
        mesh = load_mesh(source)
        if mesh.is_point_cloud and expected.labels_at != "vertices":
            raise MeshError(f"{mesh.name}: the network labels {expected.labels_at}, and a point cloud has none")
        sample = _sample(mesh, expected, cache_dir)
        results.append((mesh, predict_classes(network, sample, expected.options, device).cpu().numpy()))
    return results


def _sample(mesh: Mesh, expected: NetworkInput, cache_dir: str | os.PathLike[str] | None) -> Sample:
    """A mesh as a network takes it. It has no labels."""
    options, statistics = expected.options.preprocessing, expected.statistics
    arrays = own_arrays(mesh, options.features, statistics)
    if expected.normalize:
        taken, operators = prepare(mesh, options, cache_dir)
    else:
        taken = mesh
        operators = precompute(
            mesh,
            k=options.k,
            laplacian=options.laplacian,
            cache_dir=cache_dir,
            basis=options.basis,
            join=options.join,
        )
    features = input_features(taken, operators, options.features, statistics=statistics, arrays=arrays)
    return Sample((mesh.name,), features, torch.zeros(0, dtype=torch.int64), operators)


def write_predictions(
    predictions: Sequence[tuple[Mesh, NDArray[np.int64]]],
    label_names: Sequence[str],
    at: LabelsAt,
    *,
    plys: Sequence[Path],
    html: Path | None = None,
    png: Path | None = None,
) -> None:
    """Write each prediction as a colored mesh, and optionally all of them as one interactive page and one picture."""
    for (mesh, labels), path in zip(predictions, plys, strict=True):
        write_ply(path, mesh, labels=labels, at=at)
    meshes = [mesh for mesh, _ in predictions]
    predicted = [{"prediction": labels} for _, labels in predictions]
    titles = [mesh_stem(mesh.name) for mesh in meshes]
    if html is not None:
        shown = page(
            meshes, labels=predicted, at=at, label_names=label_names, titles=titles, heading="Predicted segmentation"
        )
        shown.save(html)
    if png is not None:
        several = titles if len(titles) > 1 else None
        drawn = picture(meshes, labels=predicted, at=at, label_names=label_names, titles=several, size=PICTURE_SIZE)
        write_atomically(png, png_bytes(drawn.pixels))
