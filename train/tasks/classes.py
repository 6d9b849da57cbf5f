"""Classes that don't count, weights of classes, and classes that a mirror image exchanges."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.data import UNLABELED, DataError, LabeledMesh, LabeledMeshes, chosen_classes, without_classes
from diffnet.data.labeled import counted
from diffnet.data.stored import names_of, remembered
from diffnet.geometry.errors import OptionError, raised_as
from diffnet.train.options import TrainOptions
from diffnet.train.options.labels import BALANCED, BY_FREQUENCY
from diffnet.train.options.shared import weight_entries
from diffnet.train.options.sides import FDI, NO_SIDES, are_numbers, side_pairs, tooth_on_other_side
from diffnet.train.validation import held_out

MAX_RATIO = 20.0  # of weights by frequency, without a warning


def with_class_options(data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
    """The data without the ignored classes, and the options with names of classes and a number for each class.

    Warns of weights by frequency that differ by more than MAX_RATIO. Raises OptionError for a class that the data
    don't have, for another number of weights than classes, if only one class is left, and for label smoothing of a
    single class.
    """
    whole = data
    ignored = _class_names("ignore", options.ignore, whole)
    data = without_classes(data, ignored)
    if ignored and len(data.label_names) == 1:
        raise OptionError(f"ignore leaves only the class {data.label_names[0]!r}; at least 2 should be left")
    if options.label_smoothing > 0 and len(data.label_names) == 1:
        raise OptionError(f"label_smoothing needs at least 2 classes, and there is only {data.label_names[0]!r}")
    weights = None if options.class_weights is None else _weights(options, data, whole)
    text = None if weights is None else ",".join(f"{weight:.8g}" for weight in weights)
    mirrored = _mirrored(options.mirror_labels, data)
    return data, replace(options, ignore=ignored, class_weights=text, mirror_labels=mirrored)


def _mirrored(text: str | None, data: LabeledMeshes) -> str | None:
    """The number of the class that each class becomes in a mirrored mesh, -1 for none. `NO_SIDES` and None stay."""
    if text is None or text == NO_SIDES:
        return text
    names = data.label_names
    if text == FDI:
        others = {name: other for name in names if (other := tooth_on_other_side(name)) is not None}
        if not others:
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise OptionError(f"mirror_labels is {FDI}, but no class is an FDI number of a tooth; they are {shown}")
        if alone := [name for name, other in others.items() if other not in names]:
            warnings.warn(
                f"--mirror-labels {FDI}: there is no class for the mirror image of {', '.join(alone)}, so these are "
                "unlabeled in mirrored meshes",
                stacklevel=4,
            )
    elif are_numbers(text):
        numbers = [int(number) for number in text.split(",")]
        if len(numbers) != len(names) or max(numbers) >= len(names):
            classes = counted(len(names), "class", "classes")
            raise OptionError(f"mirror_labels should be the numbers of {classes}, from 0, got {text}")
        return text
    else:
        flat = _class_names("mirror_labels", [name for pair in side_pairs(text) for name in pair], data)
        if len(set(flat)) < len(flat):
            raise OptionError(f"mirror_labels should name each class once, got {text!r}")
        others = {name: flat[i ^ 1] for i, name in enumerate(flat)}
    places = {name: i for i, name in enumerate(names)}
    return ",".join(str(places.get(others.get(name, name), UNLABELED)) for name in names)


def _weights(options: TrainOptions, data: LabeledMeshes, whole: LabeledMeshes) -> list[float]:
    """The weights of the classes of the data. The option `class_weights` names classes of the whole set."""
    names, text = data.label_names, str(options.class_weights)
    if text in BY_FREQUENCY:
        others = held_out(names_of(data.train), options) if options.validation else []
        weights = frequency_weights(data, 1.0 if text == BALANCED else 0.5, others)
        most, least = int(np.argmax(weights)), int(np.argmin(weights))
        if weights[most] > MAX_RATIO * weights[least]:
            hint = ", or sqrt, whose weights differ less" if text == BALANCED else ""
            warnings.warn(
                f"--class-weights {text}: the weight of {names[most]!r} is {weights[most]:.3g}, "
                f"{weights[most] / weights[least]:.0f} times that of {names[least]!r}, {weights[least]:.3g}. With such "
                f"weights, networks usually predict rare classes in wrong places. Try no class weights{hint}",
                stacklevel=4,
            )
        return weights
    entries = weight_entries("class_weights", text)
    if entries[0][0] is not None:
        class_names = _class_names("class_weights", [name for name, _ in entries if name is not None], whole)
        by_name = dict(zip(class_names, (weight for _, weight in entries), strict=True))
        if len(by_name) < len(class_names):
            raise OptionError(f"class_weights should name each class once, got {text!r} for {', '.join(class_names)}")
        gone = [name for name in class_names if name not in names]
        if gone:
            raise OptionError(f"class_weights should name classes that count, but ignore leaves out {gone[0]!r}")
        return [by_name.get(name, 1.0) for name in names]
    if len(entries) != len(names):
        count, classes = counted(len(entries), "weight", "weights"), counted(len(names), "class", "classes")
        raise OptionError(f"class_weights has {count} for {classes}")
    return [weight for _, weight in entries]


def _class_names(option: str, texts: Sequence[str], data: LabeledMeshes) -> tuple[str, ...]:
    with raised_as(OptionError, f"{option} can't be used", DataError):
        return chosen_classes(texts, data.label_names, data.label_numbers)


def frequency_weights(data: LabeledMeshes, power: float = 1.0, others: Sequence[int] = ()) -> list[float]:
    """A weight for each class, inverse to a power of the number of its elements in the training part.

    others: the numbers of training meshes that don't count

    The mean weight of an element is 1. With power 1, all classes that occur have the same sum of weights. Classes that
    don't occur have weight 1.
    """
    counts = class_counts(data, jobs=1, others=others)[1:].astype(np.float64)
    occurs = counts > 0
    weights = np.where(occurs, np.maximum(counts, 1) ** -power, 0.0)
    weights *= counts.sum() / max(float(weights @ counts), 1e-300)
    return [float(weight) for weight in np.where(occurs, weights, 1.0)]


def class_counts(data: LabeledMeshes, jobs: int | None, others: Sequence[int] = ()) -> NDArray[np.int64]:
    """The numbers of training elements (1 + C,) that are unlabeled, and that have each class. jobs: see `remembered`

    others: see `frequency_weights`
    """
    labels, classes = getattr(data.train, "mesh_labels", None), len(data.label_names)
    if labels is not None:
        return np.bincount(np.delete(labels.reshape(-1), others) + 1, minlength=classes + 1)
    counts = remembered(partial(_counts_of, classes=classes), data.train, "class counts", classes, jobs=jobs)
    return np.delete(np.array(counts, np.int64).reshape(-1, classes + 1), others, axis=0).sum(0)


def _counts_of(item: LabeledMesh, classes: int) -> list[int]:
    return np.bincount(item.labels.reshape(-1) + 1, minlength=classes + 1).tolist()


@cache
def numbers_on(device: torch.device, text: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (C,) of an option, on a device. They stay there: a CUDA graph can't copy from the host."""
    return torch.tensor([float(number) for number in text.split(",")], dtype=dtype, device=device)
