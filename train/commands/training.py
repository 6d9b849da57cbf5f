"""The parts of `diffnet train TASK` that all tasks share. `train/tasks/commands/` has the commands."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from diffnet.geometry.files import make_folder
from diffnet.interrupts import INTERRUPTED, TERMINATED, ExitAtCtrlC, Terminated, is_command
from diffnet.train.commands.console import console
from diffnet.train.commands.shared_options import with_shared_options
from diffnet.train.options import TrainOptions
from diffnet.train.place import place
from diffnet.train.recipes import recipe as options_of_recipe
from diffnet.train.tasks.options.all_tasks import TASK_OPTIONS
from diffnet.train.tasks.options.shared import TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes
    from diffnet.train.checkpoint import Checkpoint
    from diffnet.train.ranks import Ranks
    from diffnet.train.tasks.task import Task


class Loaded(NamedTuple):
    """The data set of a run, see `run_training`.

    options: those of the run, which may depend on the data
    notes: how they depend on it, for the summary
    """

    data: LabeledMeshes
    options: TrainOptions
    notes: tuple[str, ...] = ()


def training_command(
    task: TaskName, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the command of a task. The shared options get the defaults of the task's recipe.

    without: shared options that the command doesn't have, besides those that the task refuses
    """
    defaults = TrainOptions(task=task, **options_of_recipe("default", task))
    left_out = (*TASK_OPTIONS[task].unavailable, *without)
    return lambda command: with_shared_options(command, defaults, left_out)


def check_data(path: str | Path, task: TaskName) -> None:
    """Raises DataError if a data set is neither at this path nor the generated one of the task."""
    from diffnet.data import DataError
    from diffnet.data.shards.archives import is_url

    options = TASK_OPTIONS[task]
    known = options.generated is None or options.variant(path) is not None
    if not known and not is_url(path) and not Path(path).exists():
        raise DataError(f"{path}: no such file or folder; {options.generated} is the generated set of {task}")


def run_command(
    name: TaskName,
    load: Callable[[TrainOptions, Mapping[str, Any] | None], Loaded],
    out: Path,
    given: dict[str, Any],
) -> None:
    """Run the training of a task.

    load: (options, checkpoint of the run to resume, or None) to the data set
    given: arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.ranks import RankError, connected
        from diffnet.train.run import check_folder, run_training
        from diffnet.train.run_checks import check_divided
        from diffnet.train.tasks.registry import task_named

        task = task_named(name)

    if is_command():
        gc.freeze()  # garbage collections needn't walk the 250,000 objects of the imports
    resume = given["resume"]

    def trained(ranks: Ranks) -> dict[str, Any]:
        chosen = pick_device(given["device"])
        if resume:
            ranks.shared(lambda: check_folder(out, resume))
        before = _run_to_resume(name, out) if resume else None
        _complete(name, given, None if before is None else before["options"], ranks.place.world_size)
        names = {field.name for field in fields(TrainOptions)}
        options = TrainOptions(task=name, **{option: value for option, value in given.items() if option in names})
        check_divided(options, ranks)  # before the data are read, which can take long
        ranks.shared(lambda: check_folder(out, resume))
        make_folder(given["cache"])
        dataset, options, notes = ranks.after_first(lambda: load(options, before))
        counts = getattr(dataset.train, "vertex_counts", None)  # generated sets have none, and few classes
        if counts is not None and len(counts):
            hint = TASK_OPTIONS[name].advice(options, len(dataset.label_names), float(counts.mean()))
            notes = (*notes, *([] if hint is None else [hint]))
        return run_training(
            dataset,
            options,
            out,
            device=chosen,
            cache_dir=given["cache"],
            jobs=given["jobs"],
            resume=resume,
            capture=given["capture"],
            memory=given["memory"],
            checkpoint_every=given["checkpoint_every"],
            ranks=ranks,
            notes=notes,
            console=console,
        )

    try:
        with connected() as ranks:
            results = trained(ranks)
    except (KeyboardInterrupt, Terminated) as end:
        if place().rank == 0:
            console.print(f"Stopped. {_hint(out, given)}".rstrip(), soft_wrap=True)
        raise typer.Exit(TERMINATED if isinstance(end, Terminated) else INTERRUPTED) from None
    except RankError as e:
        raise RankError(f"{e}. {_hint(out, given)}".removesuffix(". ")) from e
    if ranks.is_first:
        print_results(task, results, out)


def _hint(out: Path, given: Mapping[str, Any]) -> str:
    """What a run has left."""
    last, what = out / "last.pt", "complete epoch" if given["checkpoint_every"] is None else "checkpoint"
    return f"{last} holds the last {what}; --resume continues from it." if last.exists() else ""


def _run_to_resume(task: TaskName, out: Path) -> Checkpoint:
    """The checkpoint of the run in a folder. Raises CheckpointError if it is one of another task."""
    from diffnet.train.checkpoint import CheckpointError, load_checkpoint

    found = load_checkpoint(out / "last.pt")
    trained = found["options"]["task"]
    if trained != task:
        raise CheckpointError(f"{out / 'last.pt'}: this run is one of `diffnet train {trained}`, not of {task}")
    console.print(f"resuming {out}: options that are not given are those of this run", soft_wrap=True)
    return found


def _complete(task: TaskName, given: dict[str, Any], before: Mapping[str, Any] | None, ranks: int) -> None:
    """Give values to all arguments that are not on the command line: those of the run to resume, or of the recipe.

    before: options of the run to resume, or None. If --recipe is given, only the epochs and the meshes of a batch count
    ranks: the number of ranks. A batch of a new run has a mesh for each.
    """
    context: typer.Context = given["context"]
    sources = {name: context.get_parameter_source(name) for name in given}
    defaults = {name for name, source in sources.items() if source is not None and source.name == "DEFAULT"}
    chosen = {name: value for name, value in given.items() if name not in defaults}
    named = options_of_recipe(given["recipe"], task, chosen)
    followed = {**TrainOptions(task=task, **named).as_dict(), "laplacian": named.get("laplacian")}
    followed["batch_meshes"] = max(followed["batch_meshes"], ranks)
    if given["batch_vertices"] is not None:
        followed["batch_meshes"] = None  # one limit instead of the other
    if before is not None:
        names = before if "recipe" in defaults else ("epochs", "batch_meshes")
        followed |= {name: before[name] for name in names}
    given.update({name: value for name, value in followed.items() if name in defaults})


def print_results(task: Task[Any, Any], results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    table, line = task.summary(results)
    if table.rows:  # there are none if the truth isn't known
        console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
