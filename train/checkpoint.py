"""Checkpoints hold everything needed to predict with a network and to resume its training."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from diffnet import DiffusionNet
from diffnet.data import FEATURE_CHANNELS, LabelsAt
from diffnet.geometry.errors import DiffnetError
from diffnet.train.options import TrainOptions
from diffnet.train.report.export import write_atomically

FORMAT = 1
CONTENT = {"model", "optimizer", "history", "best", "options", "label_names", "labels_at", "data"}

Checkpoint = dict[str, Any]


class CheckpointError(DiffnetError, ValueError):
    """A file is not a usable checkpoint. The message names the file and gives the reason."""


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint. The file is complete at any time: the old one stays until the new one is written."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint. It can hold only tensors and plain values, never code. Raises CheckpointError."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # unpickling a damaged file can raise any error: KeyError, IndexError, struct.error …
        reason = e.strerror if isinstance(e, OSError) else type(e).__name__
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one ({reason})") from e
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise CheckpointError(f"{path}: not a checkpoint of `diffnet train`")
    if checkpoint["format"] != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {checkpoint['format']}, this version reads {FORMAT}")
    if not checkpoint.keys() >= CONTENT:
        raise CheckpointError(f"{path}: the checkpoint lacks {', '.join(sorted(CONTENT - checkpoint.keys()))}")
    return checkpoint


def build_model(options: TrainOptions, label_names: list[str], labels_at: LabelsAt) -> DiffusionNet:
    """A network with random weights, as the options describe it."""
    return DiffusionNet(
        FEATURE_CHANNELS[options.preprocessing.features],
        len(label_names),
        width=options.width,
        blocks=options.blocks,
        dropout=options.dropout,
        diffusion=options.diffusion,
        attention_heads=options.attention_heads,
        outputs_at=labels_at,
        backend=options.backend,
    )


def restore_model(checkpoint: Checkpoint) -> tuple[DiffusionNet, TrainOptions]:
    """The trained network of a checkpoint, in eval mode, and the options of its run."""
    options = TrainOptions(**checkpoint["options"])
    model = build_model(options, checkpoint["label_names"], checkpoint["labels_at"])
    model.load_state_dict(checkpoint["model"])
    return model.eval(), options
