"""Predictions of a network on samples, and their tally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import PairSample, Sample
from diffnet.train.batches import packed
from diffnet.train.device import autocast
from diffnet.train.options import TrainOptions
from diffnet.train.run_folder.spool import Spool
from diffnet.train.tasks.task import Task


def evaluate(
    task: Task[Any, Any],
    model: DiffusionNet,
    samples: Sequence[Sample | PairSample],
    options: TrainOptions,
    device: torch.device,
    predictions: list[Tensor] | Spool | None = None,
) -> Tensor:
    """The tally of a network on samples, on the CPU. For labels, that is the confusion matrix (C, C) int64.

    predictions: a list to which the predictions of each sample are appended, on the CPU, see `Task.predict`
    """
    channels = model.last.out_features
    tally = task.new_tally(channels, device)
    for sample in packed(samples, [[i] for i in range(len(samples))], device):
        with autocast(options.precision, device):
            features = task.inputs(model, sample.features, sample.operators, options)
        outputs = network_outputs(model, replace(sample, features=features), options, device)
        predicted = task.predict(task.from_network(outputs, sample.operators, options))
        tally += task.tally(predicted, sample.labels, channels)
        if predictions is not None:
            predictions.append(predicted.cpu())
    return tally.cpu()


def network_outputs(model: DiffusionNet, sample: Sample, options: TrainOptions, device: torch.device) -> Tensor:
    """The outputs (N, C) of a network for a sample, on the device, in eval mode and without gradients.

    They are at the elements that have the labels, see `Sample.interpolation`.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(options.precision, device):
        sample = sample.to(device)
        outputs: Tensor = model(sample.features, sample.operators)
        if sample.interpolation is not None:
            outputs = sample.interpolation(outputs)
    model.train(was_training)
    return outputs
