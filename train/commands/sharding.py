"""`diffnet precompute --write-shards`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diffnet.data.options import Preprocessing
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder
from diffnet.train.commands.mesh_files import find_meshes, part_numbers
from diffnet.train.commands.training import find_data
from diffnet.train.console import complain, console
from diffnet.train.options import TASK_OPTIONS, TrainOptions
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import SetOptions

if TYPE_CHECKING:
    import torch


def write_into_shards(
    paths: list[Path],
    folder: Path,
    options: Preprocessing,
    cache: Path,
    jobs: int | None,
    device: torch.device,
    task: TaskName | None,
    targets: str | None,
    part: str | None,
    group_by: str | None,
) -> None:
    """Write a set, or meshes without labels, into shards. Raises Exit with code 1 if meshes can't be used."""
    from diffnet.data import LabeledMeshes, write_shards
    from diffnet.data.shards.writing import MeshFiles
    from diffnet.train.console import progress_bar
    from diffnet.train.tasks.task import task_named

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError("--write-shards takes one process for each --part, and torchrun has started several")
    if targets is not None and (task is None or "targets" not in TASK_OPTIONS[task].own_names):
        raise OptionError("--targets is for --task regression")
    number, parts = (1, 1) if part is None else part_numbers(part)
    make_folder(cache)
    if task is None:
        data = LabeledMeshes(MeshFiles(find_meshes(paths, folder), cache), [], [], "meshes")
    elif len(paths) > 1:
        raise OptionError(f"--task {task} takes one data set, got {len(paths)} paths")
    else:
        own, how = task_named(task), SetOptions(cache=cache, jobs=jobs, targets=targets, group_by=group_by)
        if own.meshes_of_sample > 1:
            raise OptionError(f"sets for {task} can't be written into shards")
        place = str(paths[0]) if paths[0].exists() else find_data(str(paths[0]), task)
        data = own.load([place], how, TrainOptions(task=task))
    count = len(range(number - 1, len(data.train) + len(data.validation) + len(data.test), parts))
    with progress_bar(console) as bar:
        shown = bar.add_task("preprocessing", total=count)
        failed = write_shards(
            data, folder, options, cache, jobs, lambda: bar.advance(shown), device, part=(number, parts)
        )
    of_part = "" if part is None else f" of part {part}"
    hint = "" if parts == 1 else ". When all parts are done, repeat the call without --part, which writes the index"
    console.print(f"{count - len(failed)} of {count} meshes{of_part} are in {folder}{hint}", soft_wrap=True)
    for reason in failed.values():
        complain(reason)
    if failed:
        raise typer.Exit(1)
