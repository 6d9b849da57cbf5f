"""The parts of the set of a run: which meshes choose an epoch, and what a run says of its set before it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from diffnet import DiffusionNet
from diffnet.data import LabeledMesh, LabeledMeshes, vector_channels
from diffnet.data.folders.division import AT_RANDOM
from diffnet.data.folders.files import listing
from diffnet.data.labeled import counted
from diffnet.data.stored import joined, names_of, remembered, vertex_counts_of
from diffnet.geometry import is_inside_out
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text
from diffnet.geometry.options import JoinRule
from diffnet.train.fine_tuning import start_note
from diffnet.train.metrics import percent
from diffnet.train.options import TrainOptions
from diffnet.train.options.sides import found_sides
from diffnet.train.orientation import rotations_of
from diffnet.train.tasks.task import Task
from diffnet.train.validation import held_out

D = TypeVar("D", bound=LabeledMeshes)


def with_held_out(data: D, options: TrainOptions) -> tuple[D, list[int]]:
    """The data set with its meshes for validation behind the training meshes, and the numbers of the held-out meshes.

    A set without such meshes holds out a random share of the training meshes, see `held_out`.

    Raises OptionError if the set has such meshes and `validation` is given, and for groups without a random division.
    """
    if options.group_by is not None and not options.validation and AT_RANDOM not in data.source:
        by = f": the set is divided {data.source}" if data.source else ""
        raise OptionError(f"group_by is {options.group_by!r}, but nothing is divided at random{by}")
    if not len(data.validation):
        return data, held_out(names_of(data.train) if options.validation else [""] * len(data.train), options)
    if options.validation > 0:
        raise OptionError(
            f"validation is {options.validation}, but the set has {counted(len(data.validation), 'mesh', 'meshes')} "
            f"for validation; it is divided {data.source}"
        )
    numbers = range(len(data.train), len(data.train) + len(data.validation))
    return replace(data, train=joined([data.train, data.validation]), validation=()), list(numbers)


def part_names(data: LabeledMeshes, held_out: Sequence[int]) -> dict[str, list[str]]:
    """The names of the meshes of each part. held_out: the numbers of the training meshes for validation"""
    names, tests = (list(map(as_text, names_of(part))) for part in (data.train, data.test))
    fitted = sorted(set(range(len(names))) - set(held_out))
    return {"train": [names[i] for i in fitted], "validation": [names[i] for i in held_out], "test": tests}


def meshes_text(parts: dict[str, list[str]]) -> str:
    """How many meshes each part has."""
    verbs = {"train": "train on", "validation": "validate on", "test": "test on"}
    return ", ".join(f"{len(names)} to {verbs[part]}" for part, names in parts.items() if names)


def set_summary(
    task: Task[Any, Any],
    data: LabeledMeshes,
    parts: dict[str, list[str]],
    options: TrainOptions,
    jobs: int | None,
    start: DiffusionNet | None = None,
) -> list[str]:
    """The lines about a set: its parts, labels or targets, features, what is left out, and how the network starts."""
    held, variants, rotated = options.validation, options.mesh_variants.count, rotations_of(options)
    by = "" if options.group_by is None else f" by groups of {options.group_by!r}"
    rows = [
        ("meshes", meshes_text(parts)),
        ("divided", data.source),
        ("validation", f"{percent(held, 0)} at random{by}, seed {options.seed}" if held else ""),
        *task.described(data, jobs),
        ("conditions", listing(data.condition_names)),
        ("features", options.features + (f"; {rotated}" if rotated else "")),
        ("training", f"{counted(options.epochs, 'epoch', 'epochs')}, learning rate {options.learning_rate:.2g}"),
        ("variants", f"{variants} of each training mesh" if variants else ""),
        ("inside out", inside_out_text(data, options, jobs)),
        *(("left out", text) for text in data.left_out),
        *(("hint", text) for text in _hints(task, data, options)),
        ("note", "" if start is None else start_note(start, options, data.label_names)),
    ]
    return [f"{name}: {text}" for name, text in rows if text]


def _hints(task: Task[Any, Any], data: LabeledMeshes, options: TrainOptions) -> Iterator[str]:
    """What may keep a network from learning: sides that features can't tell apart, and meshes with few eigenpairs."""
    sides = found_sides(data.label_names) if task.no_classes is None else []
    if sides and not vector_channels(options.features):
        pair = " and ".join(sides[0])
        yield f"{pair} look alike to these features; --features xyz+normals --no-rotate tells them apart"
    for part in (data.train, data.test):
        count, name = min(zip(vertex_counts_of(part).tolist(), names_of(part), strict=True), default=(options.k, ""))
        if count < options.k:
            yield f"--k is {options.k}, but {as_text(name)} has {count} vertices and no more eigenpairs"
            break


def inside_out_text(data: LabeledMeshes, options: TrainOptions, jobs: int | None) -> str:
    """Which meshes have surfaces that are inside out, or nothing. jobs: see `remembered`"""
    names, work = list[str](), partial(_is_inside_out, join=options.join)
    for part in (data.train, data.validation, data.test):
        answers = remembered(work, part, "turned", options.join, jobs=jobs)
        names += [as_text(name) for name, answer in zip(names_of(part), answers, strict=True) if answer]
    effect = "stay so" if options.operators == "original" else "are turned"
    return f"{counted(len(names), 'mesh', 'meshes')} whose normals {effect}: {listing(names)}" if names else ""


def _is_inside_out(item: LabeledMesh, join: JoinRule) -> bool:
    return is_inside_out(item.mesh, join)
