"""Predictions of a trained network on new meshes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.cuda_graphs import graphed
from diffnet.data import LabelsAt, Sample, input_features, prepare
from diffnet.geometry import Mesh, MeshError, MeshLike, load_mesh
from diffnet.geometry.files import write_atomically
from diffnet.geometry.mesh.mesh import mesh_stem
from diffnet.train.checkpoint import Checkpoint, restore_model
from diffnet.train.evaluate import predict_classes
from diffnet.viz import page, picture, write_ply
from diffnet.viz.render import png_bytes

PICTURE_SIZE = (600, 600)  # width and height of the picture of one mesh, in pixels


def predict_labels(
    sources: Sequence[MeshLike],
    checkpoint: Checkpoint,
    device: torch.device,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[tuple[Mesh, NDArray[np.int64]]]:
    """The most likely class of every vertex, face or edge of meshes, preprocessed as in training.

    Returns for each source the mesh at its original positions, and labels (V,), (F,) or (E,) int64, which are indices
    into the checkpoint's `label_names`. Raises MeshError for a mesh that can't be used.
    """
    model, options = restore_model(checkpoint)
    model = graphed(model.to(device))
    results = []
    for source in sources:
        mesh = load_mesh(source)
        if mesh.is_point_cloud and checkpoint["labels_at"] != "vertices":
            raise MeshError(f"{mesh.name}: the network labels {checkpoint['labels_at']}, and a point cloud has none")
        normalized, operators = prepare(mesh, options.preprocessing, cache_dir)
        features = input_features(normalized, operators, options.preprocessing.features)
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
