"""`diffnet precompute` and `diffnet info`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from diffnet.data.feature_names import AUTO_LABELS
from diffnet.data.options import Preprocessing
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder
from diffnet.geometry.options import scale_in_units
from diffnet.geometry.processes import take_phases
from diffnet.interrupts import ExitAtCtrlC
from diffnet.options import option
from diffnet.train.commands.exporting import write_inputs
from diffnet.train.commands.many_files import end
from diffnet.train.commands.mesh_files import files_of_first, find_meshes, part_numbers, part_of
from diffnet.train.commands.options import (
    MESH_FILES,
    PATTERN,
    ConditionOption,
    RunOptions,
    checkpoint_option,
    parameters,
    with_parameters,
)
from diffnet.train.commands.training import find_data
from diffnet.train.console import console
from diffnet.train.options import TrainOptions, tasks_with
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import SetOptions

if TYPE_CHECKING:
    import torch

SHARDS_PANEL = "Shards"  # of --help
EXPORT_PANEL = "Exported networks"
_PREPROCESSING = "k", "laplacian", "basis", "join", "operators", "normalize", "units"


@with_parameters(
    *parameters(
        TrainOptions,
        _PREPROCESSING,
        panel=None,
        changes={"k": {"least": 1, "help": "Number of eigenpairs of the spectral basis."}},
    ),
    *parameters(SetOptions, ("files",), changes={"files": PATTERN}),
    *parameters(RunOptions, ("cache", "jobs", "device"), panel=None),
    *parameters(
        TrainOptions,
        ("targets", "labels", "group_by", "features"),
        panel=SHARDS_PANEL,
        changes={
            "labels": {"default": None},
            "features": {
                "default": None,
                "help": "Features for training. Own arrays among them, file:NAME, are written.",
            },
        },
    ),
)
def precompute(
    context: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Meshes, or folders to search for meshes.")],
    part: str | None = option(None, "Preprocess part I of N, for array jobs: 1/4, 2/4, 3/4 and 4/4.", metavar="I/N"),
    write_shards: Path | None = option(
        None,
        "Write meshes and operators into a few large files in DIR. The cache keeps only what it had.",
        panel=SHARDS_PANEL,
        metavar="DIR",
    ),
    task: TaskName | None = option(
        None, "Write the labels, too. PATH is then the data set of `diffnet train TASK`.", panel=SHARDS_PANEL
    ),
    npz: Path | None = option(
        None,
        "Write what a file of `diffnet export` takes: an .npz file, or a folder for several meshes.",
        panel=EXPORT_PANEL,
        metavar="PATH",
    ),
    checkpoint: Annotated[
        Path | None,
        checkpoint_option(
            "The network that was exported. Features and preprocessing are those of its training.",
            rich_help_panel=EXPORT_PANEL,
        ),
    ] = None,
    condition: ConditionOption = None,
    verbose: bool = option(False, "Print how long each phase took."),
    **options: Any,
) -> None:
    """Preprocess meshes into the cache, so that training and prediction start at once.

    With --write-shards, the operators go into a few large files instead, with the meshes and, with --task, their
    labels. `diffnet train TASK --data DIR` reads them. A call that was stopped can be repeated. With --npz, the arrays
    that an exported network takes go into files of NumPy.

    Positions are normalized first, as in training. A mesh that can't be used does not stop the others. It is listed at
    the end, and the exit code is 1. Under torchrun, all ranks share the work, also on several machines.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.preprocessing import fill_cache_with_bar
        from diffnet.train.ranks import RankError, connected

    cache, jobs, device = (options[name] for name in ("cache", "jobs", "device"))
    if npz is not None:
        write_inputs(context, paths, npz, checkpoint, condition, cache, part)
        return
    if checkpoint is not None or condition:
        raise OptionError(f"--{'condition' if condition else 'checkpoint'} is for --npz")
    features = options["features"]
    of_set = {name: options[name] for name in ("targets", "labels", "group_by") if options[name]}
    values = {name: options[name] for name in _PREPROCESSING if name != "units"}
    values["normalize"] = scale_in_units(options["normalize"], options["units"])
    preprocessing = Preprocessing(**values, features=features or "xyz")
    if write_shards is not None:
        where = pick_device(device)
        how = SetOptions(cache=cache, jobs=jobs, files=options["files"], **of_set)
        _write_shards(paths, write_shards, preprocessing, how, where, task, part)
        return
    if task or of_set or features:
        raise OptionError("--task, --targets, --labels, --group-by and --features are for --write-shards")
    try:
        with connected() as ranks:
            files = files_of_first(ranks, lambda: part_of(find_meshes(paths, pattern=options["files"]), part))
            make_folder(cache)
            failed = fill_cache_with_bar(files, preprocessing, cache, jobs, console, pick_device(device), ranks=ranks)
            if ranks.is_first:
                of_part = "" if part is None else f" of part {part}"
                console.print(
                    f"{len(files) - len(failed)} of {len(files)} meshes{of_part} are in {cache}", soft_wrap=True
                )
                if verbose:
                    seconds = ", ".join(f"{name} {duration:.1f} s" for name, duration in take_phases().items())
                    console.print(f"added up over processes and threads: {seconds}", highlight=False)
    except RankError as e:
        raise RankError(f"{e}. The cache keeps complete meshes, and the same command computes the others") from e
    end([], None, list(failed.values()), ranks)


def _write_shards(
    paths: list[Path],
    folder: Path,
    options: Preprocessing,
    how: SetOptions,
    device: torch.device,
    task: TaskName | None,
    part: str | None,
) -> None:
    """Write a set, or meshes without labels, into shards. Raises Exit with code 1 if meshes can't be used."""
    from diffnet.data import LabeledMeshes, write_shards
    from diffnet.data.shards.writing import MeshFiles
    from diffnet.train.console import progress_bar
    from diffnet.train.ranks import ALONE
    from diffnet.train.tasks.task import task_named

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError("--write-shards takes one process for each --part, and torchrun has started several")
    requests = {"targets": how.targets is not None, "labels": how.labels != AUTO_LABELS}
    for name in (name for name, is_asked in requests.items() if is_asked):
        if task not in tasks_with(name):
            raise OptionError(f"--{name} is for --task {' and '.join(tasks_with(name))}")
    number, parts = (1, 1) if part is None else part_numbers(part)
    cache, jobs = how.cache, how.jobs
    make_folder(cache)
    if task is None:
        data = LabeledMeshes(MeshFiles(find_meshes(paths, folder, how.files), cache), [], [], "meshes")
    elif len(paths) > 1:
        raise OptionError(f"--task {task} takes one data set, got {len(paths)} paths")
    else:
        reader = task_named(task)
        if reader.meshes_of_sample > 1:
            raise OptionError(f"sets for {task} can't be written into shards")
        # A path has lost its "./", so a folder with the name of a built-in set wins here.
        place = str(paths[0]) if paths[0].exists() else find_data(str(paths[0]), task)
        data = reader.load([place], how, TrainOptions(task=task))
    count = len(range(number - 1, len(data.train) + len(data.validation) + len(data.test), parts))
    with progress_bar(console) as bar:
        shown = bar.add_task("preprocessing", total=count)
        failed = write_shards(
            data, folder, options, cache, jobs, lambda: bar.advance(shown), device, part=(number, parts)
        )
    of_part = "" if part is None else f" of part {part}"
    hint = "" if parts == 1 else ". When all parts are done, repeat the call without --part, which writes the index"
    console.print(f"{count - len(failed)} of {count} meshes{of_part} are in {folder}{hint}", soft_wrap=True)
    end([], None, list(failed.values()), ALONE)


def info(mesh: Annotated[Path, typer.Argument(metavar="MESH", help=f"A file: {MESH_FILES}.")]) -> None:
    """Show the size of a mesh, and list the arrays in its file, labels beside it, and its faults."""
    with ExitAtCtrlC():
        from diffnet.data.folders.labels import labels_beside
        from diffnet.geometry import diagnose, file_edges, load_attributes, load_mesh
        from diffnet.geometry.mesh.attributes import mesh_arrays

    loaded = load_mesh(mesh)
    diagnosis = diagnose(loaded)
    table = Table(show_header=False, box=None)
    low, high = loaded.verts.min(axis=0), loaded.verts.max(axis=0)
    table.add_row("kind", "point cloud" if loaded.is_point_cloud else "triangle mesh")
    table.add_row("vertices", str(diagnosis.vertices))
    if not loaded.is_point_cloud:
        cut = f"{loaded.polygon_count}, cut into {diagnosis.faces} triangles"
        table.add_row("faces", cut if loaded.has_polygons else str(diagnosis.faces))
        edges = len(file_edges(loaded)) if loaded.has_polygons else diagnosis.edges
        table.add_row("edges", f"{edges}, {diagnosis.boundary_edges} of them on the boundary")
        table.add_row("components", str(diagnosis.components))
        table.add_row("Euler characteristic", str(diagnosis.euler))
        table.add_row("area", f"{diagnosis.area:.6g}")
    if diagnosis.coincident_vertices:
        count, never = diagnosis.joined_by_default, "not joined by default; --join always joins them"
        joined = f"{count} of them joined by default" if count else never
        table.add_row("coincident vertices", f"{diagnosis.coincident_vertices}, {joined}")
    table.add_row("extent", " × ".join(f"{x:.6g}" for x in high - low))
    table.add_row("center", ", ".join(f"{x:.6g}" for x in (high + low) / 2))
    console.print(table)
    arrays = Table(show_header=False, box=None)
    for array in (*mesh_arrays(mesh), *labels_beside(loaded)):
        arrays.add_row("", array.name, f"{array.kind} at the {array.at}", array.summary)
    for name, values in load_attributes(mesh).fields.items():
        first = values.reshape(-1)[:8].tolist()
        shown = ", ".join(each if isinstance(each, str) else f"{each:.6g}" for each in first)
        arrays.add_row("", name, "field data", shown + (", …" if values.size > 8 else ""))
    if arrays.rows:
        console.print("arrays:")
        console.print(arrays)
    if diagnosis.faults:
        console.print("faults:")
        for fault in diagnosis.faults:
            console.print(f"  {fault}")
    else:
        console.print("no faults found")
