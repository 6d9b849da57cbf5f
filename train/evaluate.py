"""Predictions of a network on samples, and their confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import Sample
from diffnet.train.batches import packed
from diffnet.train.device import autocast
from diffnet.train.metrics import confusion_matrix
from diffnet.train.options import TrainOptions


def evaluate(
    model: DiffusionNet,
    samples: Sequence[Sample],
    options: TrainOptions,
    device: torch.device,
    predictions: list[Tensor] | None = None,
) -> Tensor:
    """The confusion matrix (C, C) int64 of a network on samples, on the CPU. See `confusion_matrix`.

    predictions: a list to which the classes of each sample are appended, (N,) int64 on the CPU
    """
    classes = model.last.out_features
    matrix = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    for sample in packed(samples, [[i] for i in range(len(samples))], device):
        predicted = predict_classes(model, sample, options, device)
        matrix += confusion_matrix(predicted, sample.labels, classes)
        if predictions is not None:
            predictions.append(predicted.cpu())
    return matrix.cpu()


def predict_classes(model: DiffusionNet, sample: Sample, options: TrainOptions, device: torch.device) -> Tensor:
    """The most likely class (N,) int64 of every vertex, face or edge of a sample, on the device."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(options.precision, device):
        sample = sample.to(device)
        prediction: Tensor = model(sample.features, sample.operators).argmax(-1)
    model.train(was_training)
    return prediction
