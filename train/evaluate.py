"""Predictions of a network on samples, and their tally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import PairSample, Sample
from diffnet.data.samples import balanced_shares, output_rows
from diffnet.train.batches import packed
from diffnet.train.device import autocast
from diffnet.train.options import TrainOptions
from diffnet.train.ranks import ALONE, Ranks
from diffnet.train.resident import counts_of
from diffnet.train.run_folder import Spool
from diffnet.train.tasks.task import Task


def evaluate(
    task: Task[Any, Any],
    model: DiffusionNet,
    samples: Sequence[Sample | PairSample],
    options: TrainOptions,
    device: torch.device,
    predictions: Spool | None = None,
    ranks: Ranks = ALONE,
) -> Tensor:
    """The tally of a network on samples, on the CPU. For labels, that is the confusion matrix (C, C) int64.

    predictions: an empty `Spool`, which gets the predictions of each sample in rank 0, see `Task.to_score`
    ranks: those that share the samples. All get the tally of all samples.
    """
    channels = model.out_channels
    tally = task.new_tally(channels, device, options)
    place = ranks.place
    numbers: Sequence[int] = range(len(samples))
    if not ranks.is_alone:
        numbers = balanced_shares([int(n) for n in counts_of(samples)], place.world_size)[place.rank]

    def keep(received: Sequence[Any]) -> None:
        if predictions is not None:
            predictions.put(*received)

    post = ranks.mailbox(keep)
    for number, sample in zip(numbers, packed(samples, [[i] for i in numbers], device), strict=True):
        outputs = network_outputs(model, sample, options, device)
        predicted = task.to_score(task.from_network(outputs, sample.operators, options), options)
        back = sample.interpolation
        targets = sample.labels if back is None else back.labels(sample.labels)
        tally += task.tally(predicted, targets, channels, options)
        if predictions is not None:
            post([number, predicted.cpu()])
    tally = tally.cpu()
    tallies = ranks.gathered(tally, meanwhile=post)
    post()
    return torch.stack(tallies).sum(0)


def network_outputs(model: DiffusionNet, sample: Sample, options: TrainOptions, device: torch.device) -> Tensor:
    """The outputs (N, C) of a network for a sample, on the device, in eval mode and without gradients.

    They are at the elements that are scored, see `Sample.interpolation`.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(options.precision, device):
        sample = sample.to(device)
        outputs = output_rows(model(*sample.inputs), model.outputs_at, sample.operators)
        if sample.interpolation is not None:
            outputs = sample.interpolation(outputs)
    model.train(was_training)
    return outputs
