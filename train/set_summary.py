"""What a run says of its data set before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffnet.data import LabeledMeshes
from diffnet.data.stored import names_of
from diffnet.geometry.files import as_text
from diffnet.train.metrics import percent
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import rotations_of
from diffnet.train.tasks.task import Task


def part_names(data: LabeledMeshes, held_out: Sequence[int]) -> dict[str, list[str]]:
    """The names of the meshes of each part. held_out: the numbers of the training meshes for validation"""
    names, chosen = list(map(as_text, names_of(data.train))), set(held_out)
    return {
        "train": [name for i, name in enumerate(names) if i not in chosen],
        "validation": [names[i] for i in held_out],
        "test": list(map(as_text, names_of(data.test))),
    }


def meshes_text(parts: dict[str, list[str]]) -> str:
    """How many meshes each part has."""
    verbs = {"train": "train on", "validation": "validate on", "test": "test on"}
    return ", ".join(f"{len(own)} to {verbs[part]}" for part, own in parts.items() if own)


def set_summary(
    task: Task[Any, Any],
    data: LabeledMeshes,
    parts: dict[str, list[str]],
    options: TrainOptions,
    jobs: int | None,
    notes: Sequence[str] = (),
) -> list[str]:
    """The lines about a set: its parts and what divides them, its labels or targets, features, and what is left out.

    parts: `part_names`
    notes: more lines
    """
    variants, rotated = options.mesh_variants, rotations_of(options)
    shares = {"cut": variants.cut, "decimated": variants.decimate}
    changes = " and ".join(f"{how} by up to {percent(share, 0)}" for how, share in shares.items() if share)
    rows = [
        ("meshes", meshes_text(parts)),
        ("divided", data.source),
        (
            "validation",
            f"{percent(options.validation, 0)} at random, seed {options.seed}" if options.validation else "",
        ),
        *task.described(data, jobs),
        ("features", options.features + (f"; {rotated}" if rotated else "")),
        ("variants", f"{variants.count} of each training mesh, {changes}" if variants.count else ""),
        *(("left out", text) for text in data.left_out),
        *(("note", text) for text in notes),
    ]
    return [f"{name}: {text}" for name, text in rows if text]
