"""`diffnet train TASK`, made from the options of a task."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import typer

from diffnet.data.feature_names import with_mask
from diffnet.data.folders.division import check_fold
from diffnet.data.options import Preprocessing
from diffnet.geometry.errors import DiffnetError, OptionError
from diffnet.geometry.files import make_folder, write_atomically
from diffnet.interrupts import INTERRUPTED, TERMINATED, ExitAtCtrlC, Terminated, is_command
from diffnet.options import Architecture, declared, option
from diffnet.pretrained import network_path
from diffnet.train.commands.options import RunOptions, described_input, parameters, with_parameters
from diffnet.train.console import console
from diffnet.train.options import TASK_OPTIONS, TrainOptions, recipe as options_of_recipe
from diffnet.train.options.panels import PANELS
from diffnet.train.options.shared import TaskName
from diffnet.train.options.task_options import RecipeName, SetOptions
from diffnet.train.place import place

if TYPE_CHECKING:
    from diffnet import DiffusionNet
    from diffnet.data import LabeledMeshes
    from diffnet.train.checkpoint import Checkpoint
    from diffnet.train.ranks import Ranks
    from diffnet.train.tasks.task import Task


class Call(NamedTuple):
    """A call of `diffnet train`, or of one of its folds.

    out: the folder of the run
    arguments: the options of the command by name
    choice_names: those of the arguments that stay as they are, because the user chose them
    fold: see `load_dataset`
    """

    task: Task[Any, Any]
    data: list[str]
    out: Path
    arguments: dict[str, Any]
    choice_names: Set[str]
    fold: tuple[int, int] | None = None

    @property
    def choices(self) -> dict[str, Any]:
        """The options that the user chose."""
        return {name: value for name, value in self.arguments.items() if name in self.choice_names}


_RECIPE = "original: features, network and training of the original implementation. Other options win."


def train_command(task: TaskName) -> Callable[..., None]:
    """The command `diffnet train TASK`. Its options have the defaults of the task's recipe."""
    task_options = TASK_OPTIONS[task]
    defaults = {**TrainOptions(task=task, **options_of_recipe("default", task)).as_dict(), "laplacian": None}
    names = [field.name for field in fields(task_options.own) if field.name not in task_options.unavailable]
    entries = [
        *parameters(SetOptions, task_options.sets),
        *parameters(task_options.own, names, defaults, task_options.changes),
        *parameters(RunOptions),
    ]

    @with_parameters(*sorted(entries, key=lambda p: PANELS.index(get_args(p.annotation)[1].rich_help_panel)))
    def command(
        data: list[str] = option(..., task_options.data),
        out: Path = option(..., "Folder for checkpoints, metrics and the report."),
        recipe: RecipeName = option("default", _RECIPE),
        **arguments: Any,
    ) -> None:
        run_command(task, data, out, {"recipe": recipe, **arguments})

    command.__doc__ = task_options.help
    return command


def find_data(path: str, task: TaskName) -> str:
    """The data set at a path, or the folder of the built-in set of this name. The name of a generated set stays.

    Raises DataError if there is none, and for a name that a folder has, too.
    """
    from diffnet.data import DataError
    from diffnet.data.shards.archives import is_url

    name, folder = TASK_OPTIONS[task].builtin, TASK_OPTIONS[task].folder
    is_there = is_url(path) or Path(path).exists()
    if name is None or (is_there and path != name):
        return path
    if is_there:
        raise DataError(f"{path} is the built-in set of {task}, and also a folder here; for the folder, give ./{path}")
    if path != name:
        raise DataError(f"{path}: no such file or folder; {name} is the built-in set of {task}")
    return path if folder is None else str(folder)


def find_sets(data: Sequence[str], task: TaskName) -> list[str]:
    """The sets at several paths, see `find_data`. Raises OptionError if the task takes one."""
    if len(data) > 1 and not TASK_OPTIONS[task].takes_several:
        raise OptionError(f"{task} takes one --data, got {', '.join(data)}")
    return [find_data(path, task) for path in data]


def run_command(name: TaskName, data: list[str], out: Path, arguments: dict[str, Any]) -> None:
    """Run the training of a task, or one for each fold.

    arguments: those of the command and its `context`. Those that have the name of an option of `TrainOptions` become
        this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.folds import FOLDS, begin_folds, fold_folder, write_folds
        from diffnet.train.ranks import RankError, connected
        from diffnet.train.tasks.task import task_named

        task = task_named(name)

    if is_command():
        gc.freeze()  # garbage collections needn't walk the 250,000 objects of the imports
    context: typer.Context = arguments.pop("context")
    # The names of the arguments that are on the command line.
    sources = {name: context.get_parameter_source(name) for name in arguments}
    chosen = {name for name, source in sources.items() if source is None or source.name != "DEFAULT"}
    call = Call(task, data, out, arguments, chosen)
    arguments["without"] = {}  # all folds add to it

    def trained(ranks: Ranks) -> None:
        folds, resume = arguments["folds"], arguments["resume"]
        if folds is None and not (resume and ranks.shared((out / FOLDS).is_file)):
            _run(call, ranks)
            return
        find_sets(data, name)  # raises, also if all folds are complete
        of_run = {name: value for name, value in call.choices.items() if name not in declared(RunOptions)}
        count, options = ranks.shared(lambda: list(begin_folds(out, name, folds, of_run, resume)))
        for fold in range(count):
            folder = fold_folder(out, fold)
            if ranks.shared((folder / "predictions.html").is_file):  # a run writes it last
                continue
            console.print(f"fold {fold + 1} of {count}: {folder}", soft_wrap=True)
            of_fold = {**arguments, **options, "resume": resume and ranks.shared((folder / "last.pt").is_file)}
            _run(Call(task, data, folder, of_fold, call.choice_names | options.keys(), (fold, count)), ranks)
        if ranks.is_first:
            console.print(write_folds(out, count))
            console.print(f"all scores: {out / 'folds.csv'}", soft_wrap=True)

    try:
        with connected() as ranks:
            trained(ranks)
    except (KeyboardInterrupt, Terminated) as end:
        if place().rank == 0:
            console.print(f"Stopped. {_hint(out, arguments)}".rstrip(), soft_wrap=True)
        raise typer.Exit(TERMINATED if isinstance(end, Terminated) else INTERRUPTED) from None
    except RankError as e:
        raise RankError(f"{e}. {_hint(out, arguments)}".removesuffix(". ")) from e


def _run(call: Call, ranks: Ranks) -> None:
    """Train, and print the scores."""
    from diffnet.train.device import pick_device
    from diffnet.train.fine_tuning import load_any_network, start_network
    from diffnet.train.run import check_folder, run_training
    from diffnet.train.run_checks import check_divided

    task, out, arguments = call.task, call.out, call.arguments
    device, resume, start = pick_device(arguments["device"]), arguments["resume"], arguments["start"]
    if resume:
        ranks.shared(lambda: check_folder(out, resume))
    before = _run_to_resume(task.name, out) if resume else None
    path = None if resume or start is None else network_path(start)
    network = None if path is None or not ranks.is_first else load_any_network(path)
    is_partial = bool(arguments.get("partial"))
    of_network = ranks.shared(
        lambda: {} if path is None or network is None else _options_of_network(path, network, is_partial)
    )
    call = _complete(call, None if before is None else before["options"], of_network, ranks.place.world_size)
    names = {field.name for field in fields(TrainOptions)}
    options = TrainOptions(task=task.name, **{name: value for name, value in call.arguments.items() if name in names})
    check_divided(options, ranks)  # before the data are read, which can take long
    if network is not None:
        start_network(options, network)  # raises
    ranks.shared(lambda: check_folder(out, resume))
    make_folder(arguments["cache"])
    how = {name: arguments[name] for name in ("jobs", "resume", "capture", "memory", "checkpoint_every")}
    where: dict[str, Any] = {"device": device, "cache_dir": arguments["cache"], "console": console}
    left_out = out / "left_out.json"  # by --skip-unusable, also for --resume
    if resume and ranks.shared(left_out.is_file):
        arguments["without"] |= ranks.shared(lambda: json.loads(left_out.read_text()))

    def run() -> dict[str, Any]:
        dataset, adapted = ranks.after_first(lambda: _loaded(call, options, before))
        if ranks.is_first and (arguments["without"] or left_out.is_file()):
            make_folder(out)
            write_atomically(left_out, json.dumps(arguments["without"]))
        return run_training(dataset, adapted, out, ranks=ranks, start=network, **where, **how)

    print_results(task, without_unusable(arguments["skip_unusable"], arguments["without"], run), out)


def _loaded(call: Call, options: TrainOptions, before: Checkpoint | None) -> tuple[LabeledMeshes, TrainOptions]:
    """The data set, and the options, which may depend on it, but for the choices of the user.

    before: checkpoint of the run to resume, or None
    """
    task, arguments = call.task, call.arguments
    data = find_sets(call.data, task.name)
    stored = {} if before is None else {"outputs_at": before["labels_at"], "channels": len(before["label_names"])}
    sets: dict[str, Any] = {name: arguments[name] or stored.get(name) for name in TASK_OPTIONS[task.name].sets}
    sets |= {name: getattr(options, name) for name in ("targets", "labels", "conditions", "group_by", "seed")}
    how = SetOptions(**sets, **{name: arguments[name] for name in ("cache", "jobs", "without")}, fold=call.fold)
    dataset = task.load(data, how, options)
    check_fold(call.fold, dataset.source)  # also of shards and of generated sets
    if before is None:
        options = task.adapted(dataset, options, call.choice_names)
    return dataset, options


def without_unusable(skip: bool, without: dict[str, str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function, which is called again without the meshes that it can't use, if `skip` is true.

    without: the reasons of meshes to leave out, by their files; it grows

    Raises the errors of `work` that are about no further mesh.
    """
    while True:
        try:
            return work()
        except DiffnetError as error:
            more = {file: reason for file, reason in error.reasons.items() if file not in without}
            if not skip or not more:
                for reason in (reason for reason in without.values() if reason != str(error)):
                    console.print(f"left out: {reason}", soft_wrap=True)
                raise
            without |= more


def _hint(out: Path, arguments: Mapping[str, Any]) -> str:
    """What a run has left."""
    from diffnet.train.folds import FOLDS

    last, what = out / "last.pt", "complete epoch" if arguments["checkpoint_every"] is None else "checkpoint"
    if (out / FOLDS).is_file():
        return f"{out} keeps what its folds have learned; --resume continues."
    return f"{last} holds the last {what}; --resume continues from it." if last.exists() else ""


def _run_to_resume(task: TaskName, out: Path) -> Checkpoint:
    """The checkpoint of the run in a folder. Raises CheckpointError if it is one of another task."""
    from diffnet.train.checkpoint import CheckpointError, load_checkpoint

    checkpoint = load_checkpoint(out / "last.pt")
    trained = checkpoint["options"]["task"]
    if trained != task:
        raise CheckpointError(f"{out / 'last.pt'}: this run is one of `diffnet train {trained}`, not of {task}")
    console.print(f"resuming {out}: options that are not given are those of this run", soft_wrap=True)
    return checkpoint


def _options_of_network(path: Path, network: DiffusionNet, partial: bool) -> dict[str, Any]:
    """The options of a run that belong to the network that it starts from. path: its file; partial: see --partial"""
    of_input, of_network = described_input(path, network).options, network.architecture
    options = {field.name: getattr(of_input, field.name) for field in fields(Preprocessing)}
    if of_input.normalize == "none":
        options["units"] = of_input.units
    elif partial:  # an area says nothing of the size of a part
        del options["normalize"]
    options |= {field.name: of_network[field.name] for field in fields(Architecture)}
    return options | ({"channels": network.out_channels} if "channels" in TASK_OPTIONS[of_input.task].sets else {})


def _complete(call: Call, before: Mapping[str, Any] | None, network: Mapping[str, Any], ranks: int) -> Call:
    """The call with the options of the run to resume, or of the recipe, for all that the user didn't choose.

    Those of the network, and a learning rate of a recipe, count as choices, because the data don't change them.

    before: options of the run to resume, or None. If --recipe is given, only the epochs and the meshes of a batch
        count, but all options of a run that started from a network
    network: options of the network that the run starts from, which come before those of the recipe
    ranks: the number of ranks. A batch of a new run has a mesh for each.
    """
    task, arguments, choices = call.task.name, call.arguments, call.choice_names
    named = options_of_recipe(arguments["recipe"], task, {**network, **call.choices})
    followed = {**TrainOptions(task=task, **named).as_dict(), "laplacian": named.get("laplacian"), **network}
    followed["batch_meshes"] = max(followed["batch_meshes"], ranks)
    if arguments["batch_vertices"] is not None:
        followed["batch_meshes"] = None  # one limit instead of the other
    if before is not None:
        keeps_all = "recipe" not in choices or before["start"] is not None
        names = before if keeps_all else ("epochs", "batch_meshes")
        followed |= {name: before[name] for name in names}
    completed = {name: value if name in choices else followed.get(name, value) for name, value in arguments.items()}
    completed["features"] = with_mask(completed["features"], completed.get("mask"))
    choices = choices | network.keys() | {"learning_rate"} & named.keys()
    return call._replace(arguments=completed, choice_names=choices)


def print_results(task: Task[Any, Any], results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    table, line = task.summary(results)
    if table.rows:  # there are none if the truth isn't known
        console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
