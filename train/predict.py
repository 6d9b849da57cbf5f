"""Predictions of a trained network on new meshes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.cuda_graphs import graphed
from diffnet.data import LabelsAt, Sample, input_features, own_arrays, prepare
from diffnet.geometry import Mesh, MeshError, MeshLike, load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.train.checkpoint import Checkpoint, restore_model
from diffnet.train.evaluate import predict_classes
from diffnet.train.report.export import png_bytes, write_atomically, write_ply
from diffnet.train.report.render import render
from diffnet.train.report.viewer import ViewerItem, write_html

PICTURE_SIZE = (600, 600)  # width and height of the picture of one mesh, in pixels


def predict_labels(
    sources: Sequence[MeshLike],
    checkpoint: Checkpoint,
    device: torch.device,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[tuple[Mesh, NDArray[np.int64]]]:
    """The most likely class of every vertex, face or edge of meshes, preprocessed as in training.

    Returns for each source the mesh at its original positions, and labels (V,), (F,) or (E,) int64, which are indices
    into the checkpoint's `label_names`.

    Raises MeshError for a mesh that can't be used, DataError for a mesh without the own arrays that the network was
    trained with.
    """
    model, options = restore_model(checkpoint)
    model = graphed(model.to(device))
    results = []
    for source in sources:
        mesh = load_mesh(source)
        if mesh.is_point_cloud and checkpoint["labels_at"] != "vertices":
            raise MeshError(f"{mesh.name}: the network labels {checkpoint['labels_at']}, and a point cloud has none")
        arrays = own_arrays(mesh, options.features, checkpoint["statistics"])
        normalized, operators = prepare(mesh, options.preprocessing, cache_dir)
        features = input_features(
            normalized, operators, options.features, statistics=checkpoint["statistics"], arrays=arrays
        )
        sample = Sample((mesh.name,), features, torch.zeros(0, dtype=torch.int64), operators)
        results.append((mesh, predict_classes(model, sample, options, device).cpu().numpy()))
    return results


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
        write_ply(path, mesh.verts, mesh.faces, labels, at)
    if html is not None:
        items = [
            ViewerItem(mesh_stem(mesh.name), mesh.verts, mesh.faces, {"prediction": labels}, at)
            for mesh, labels in predictions
        ]
        write_html(html, items, label_names, title="Predicted segmentation")
    if png is not None:
        pictures = [render(mesh.verts, mesh.faces, labels, at=at, size=PICTURE_SIZE) for mesh, labels in predictions]
        write_atomically(png, png_bytes(np.concatenate(pictures, axis=1)))
