"""`diffnet train TASK`, made from the options of a task."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from diffnet.geometry.files import make_folder
from diffnet.interrupts import INTERRUPTED, TERMINATED, ExitAtCtrlC, Terminated, is_command
from diffnet.train.commands.options import RunOptions, parameters, with_parameters
from diffnet.train.console import console
from diffnet.train.options import TASK_OPTIONS, TrainOptions, recipe as options_of_recipe
from diffnet.train.options.shared import PANELS, TaskName
from diffnet.train.options.task_options import RecipeName, SetOptions
from diffnet.train.place import place

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes
    from diffnet.train.checkpoint import Checkpoint
    from diffnet.train.ranks import Ranks
    from diffnet.train.tasks.task import Task


_RECIPE = "original: features, network and training of the original implementation. Other options win."


def train_command(task: TaskName) -> Callable[..., None]:
    """The command `diffnet train TASK`. Its options have the defaults of the task's recipe."""
    chosen = TASK_OPTIONS[task]
    defaults = {**TrainOptions(task=task, **options_of_recipe("default", task)).as_dict(), "laplacian": None}
    names = [field.name for field in fields(chosen.own) if field.name not in chosen.unavailable]
    kind: Any = list[str] if chosen.takes_several else str
    own = [
        _parameter("data", Annotated[kind, typer.Option(help=chosen.data)]),
        _parameter("out", Annotated[Path, typer.Option(help="Folder for checkpoints, metrics and the report.")]),
        *parameters(SetOptions, chosen.sets),
        *parameters(chosen.own, names, defaults, chosen.changes),
        _parameter("recipe", Annotated[RecipeName, typer.Option(help=_RECIPE)], "default"),
        *parameters(RunOptions),
    ]

    def command(**arguments: Any) -> None:
        data, out = arguments.pop("data"), arguments.pop("out")
        run_command(task, [data] if isinstance(data, str) else data, out, arguments)

    command.__doc__ = chosen.help
    return with_parameters(*sorted(own, key=lambda p: PANELS.index(get_args(p.annotation)[1].rich_help_panel)))(command)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def check_data(path: str | Path, task: TaskName) -> str | None:
    """The variant of the generated set of this name, or None if a data set is at the path. Raises DataError if neither.

    See `TaskOptions.variant`.
    """
    from diffnet.data import DataError
    from diffnet.data.shards.archives import is_url

    options = TASK_OPTIONS[task]
    variant = options.variant(path)
    if options.generated is not None and variant is None and not is_url(path) and not Path(path).exists():
        raise DataError(f"{path}: no such file or folder; {options.generated} is the generated set of {task}")
    return variant


def run_command(name: TaskName, data: list[str], out: Path, arguments: dict[str, Any]) -> None:
    """Run the training of a task.

    arguments: those of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.ranks import RankError, connected
        from diffnet.train.run import check_folder, run_training
        from diffnet.train.run_checks import check_divided
        from diffnet.train.tasks.task import task_named

        task = task_named(name)

    if is_command():
        gc.freeze()  # garbage collections needn't walk the 250,000 objects of the imports
    resume = arguments["resume"]

    def trained(ranks: Ranks) -> dict[str, Any]:
        device = pick_device(arguments["device"])
        if resume:
            ranks.shared(lambda: check_folder(out, resume))
        before = _run_to_resume(name, out) if resume else None
        chosen = _complete(name, arguments, None if before is None else before["options"], ranks.place.world_size)
        names = {field.name for field in fields(TrainOptions)}
        options = TrainOptions(task=name, **{option: value for option, value in arguments.items() if option in names})
        check_divided(options, ranks)  # before the data are read, which can take long
        ranks.shared(lambda: check_folder(out, resume))
        make_folder(arguments["cache"])
        dataset, options, notes = ranks.after_first(lambda: _loaded(task, data, options, arguments, chosen, before))
        return run_training(
            dataset,
            options,
            out,
            device=device,
            cache_dir=arguments["cache"],
            jobs=arguments["jobs"],
            resume=resume,
            capture=arguments["capture"],
            memory=arguments["memory"],
            checkpoint_every=arguments["checkpoint_every"],
            ranks=ranks,
            notes=notes,
            console=console,
        )

    try:
        with connected() as ranks:
            results = trained(ranks)
    except (KeyboardInterrupt, Terminated) as end:
        if place().rank == 0:
            console.print(f"Stopped. {_hint(out, arguments)}".rstrip(), soft_wrap=True)
        raise typer.Exit(TERMINATED if isinstance(end, Terminated) else INTERRUPTED) from None
    except RankError as e:
        raise RankError(f"{e}. {_hint(out, arguments)}".removesuffix(". ")) from e
    if ranks.is_first:
        print_results(task, results, out)


def _loaded(
    task: Task[Any, Any],
    data: list[str],
    options: TrainOptions,
    arguments: Mapping[str, Any],
    chosen: Set[str],
    before: Checkpoint | None,
) -> tuple[LabeledMeshes, TrainOptions, list[str]]:
    """The data set, the options, which may depend on it, and lines that say so.

    chosen: the options on the command line
    before: checkpoint of the run to resume, or None
    """
    *_, generated = [check_data(path, task.name) for path in data]
    stored = {} if before is None else {"outputs_at": before["labels_at"], "channels": len(before["label_names"])}
    sets: dict[str, Any] = {name: arguments[name] or stored.get(name) for name in TASK_OPTIONS[task.name].sets}
    how = SetOptions(
        **sets,
        cache=arguments["cache"],
        targets=options.targets,
        group_by=options.group_by,
        seed=options.seed,
        generated=generated if len(data) == 1 else None,
        jobs=arguments["jobs"],
    )
    dataset = task.load(data, how, options)
    if before is None:
        options = task.adapted(dataset, options, chosen)
    notes: list[str] = []
    counts = getattr(dataset.train, "vertex_counts", None)  # generated sets have none, and few classes
    if counts is not None and len(counts):
        hint = TASK_OPTIONS[task.name].advice(options, len(dataset.label_names), float(counts.mean()))
        notes = [] if hint is None else [hint]
    return dataset, options, notes


def _hint(out: Path, arguments: Mapping[str, Any]) -> str:
    """What a run has left."""
    last, what = out / "last.pt", "complete epoch" if arguments["checkpoint_every"] is None else "checkpoint"
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


def _complete(task: TaskName, arguments: dict[str, Any], before: Mapping[str, Any] | None, ranks: int) -> set[str]:
    """Give values to all arguments that are not on the command line: those of the run to resume, or of the recipe.

    Returns the names of the others.

    before: options of the run to resume, or None. If --recipe is given, only the epochs and the meshes of a batch count
    ranks: the number of ranks. A batch of a new run has a mesh for each.
    """
    context: typer.Context = arguments["context"]
    sources = {name: context.get_parameter_source(name) for name in arguments}
    defaults = {name for name, source in sources.items() if source is not None and source.name == "DEFAULT"}
    chosen = {name: value for name, value in arguments.items() if name not in defaults}
    named = options_of_recipe(arguments["recipe"], task, chosen)
    followed = {**TrainOptions(task=task, **named).as_dict(), "laplacian": named.get("laplacian")}
    followed["batch_meshes"] = max(followed["batch_meshes"], ranks)
    if arguments["batch_vertices"] is not None:
        followed["batch_meshes"] = None  # one limit instead of the other
    if before is not None:
        names = before if "recipe" in defaults else ("epochs", "batch_meshes")
        followed |= {name: before[name] for name in names}
    arguments.update({name: value for name, value in followed.items() if name in defaults})
    return set(chosen)


def print_results(task: Task[Any, Any], results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    table, line = task.summary(results)
    if table.rows:  # there are none if the truth isn't known
        console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
