"""Classes that don't count, and weights of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from diffnet.data import DataError, LabeledMeshes, chosen_classes, without_classes
from diffnet.data.counts import counted
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.class_weights import BALANCED, class_weight_entries


def with_class_options(data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
    """The data without the ignored classes, and the options with names of classes and a number for each weight.

    Raises OptionError for a class that the data don't have, for another number of weights than classes, if only one
    class is left, and for label smoothing of a single class.
    """
    names = data.label_names
    ignored = _chosen("ignore", options.ignore, names)
    data = without_classes(data, ignored)
    if ignored and len(data.label_names) == 1:
        raise OptionError(f"ignore leaves only the class {data.label_names[0]!r}; at least 2 should be left")
    if options.label_smoothing > 0 and len(data.label_names) == 1:
        raise OptionError(f"label_smoothing needs at least 2 classes, and there is only {data.label_names[0]!r}")
    weights = None if options.class_weights is None else _weights(options.class_weights, data, names)
    text = None if weights is None else ",".join(f"{weight:.8g}" for weight in weights)
    return data, replace(options, ignore=ignored, class_weights=text)


def _weights(text: str, data: LabeledMeshes, all_names: Sequence[str]) -> list[float]:
    """The weights of the classes of the data. A number in the text is the place of a class among all names."""
    names = data.label_names
    if text == BALANCED:
        return balanced_weights(data)
    given = class_weight_entries(text)
    if given[0][0] is not None:
        chosen = _chosen("class_weights", [name for name, _ in given if name is not None], all_names)
        by_name = dict(zip(chosen, (weight for _, weight in given), strict=True))
        if len(by_name) < len(chosen):
            raise OptionError(f"class_weights should name each class once, got {text!r} for {', '.join(chosen)}")
        gone = [name for name in chosen if name not in names]
        if gone:
            raise OptionError(f"class_weights should name classes that count, but ignore leaves out {gone[0]!r}")
        return [by_name.get(name, 1.0) for name in names]
    if len(given) != len(names):
        weights, classes = counted(len(given), "weight", "weights"), counted(len(names), "class", "classes")
        raise OptionError(f"class_weights has {weights} for {classes}")
    return [weight for _, weight in given]


def _chosen(option: str, given: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    try:
        return chosen_classes(given, names)
    except DataError as e:
        raise OptionError(f"{option} can't be used: {e}") from e


def balanced_weights(data: LabeledMeshes) -> list[float]:
    """A weight for each class, inversely proportional to the number of its elements in the training part.

    All classes that occur have the same sum of weights, and the mean weight of an element is 1. Others have weight 1.
    """
    counts = np.zeros(len(data.label_names), np.int64)
    for item in data.train:
        counts += np.bincount(item.labels[item.labels >= 0].reshape(-1), minlength=len(counts))
    share = counts.sum() / max(np.count_nonzero(counts), 1)
    return [float(share / count) if count > 0 else 1.0 for count in counts.tolist()]


@cache
def weights_on(device: torch.device, text: str) -> Tensor:
    """The weights (C,) float32 that an option holds as numbers, on a device.

    They stay there, because a CUDA graph can't copy them from the host.
    """
    return torch.tensor([weight for _, weight in class_weight_entries(text)], dtype=torch.float32, device=device)
