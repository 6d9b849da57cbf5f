"""`diffnet train`. Typer reads the annotations of the commands, so they are not strings."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import (
    ClassWeightsOption,
    IgnoreOption,
    LabelSmoothingOption,
    LossOption,
    OutputsAtOption,
    RunOption,
    TargetsOption,
)
from diffnet.train.commands.shared_options import with_shared_options
from diffnet.train.options import TrainOptions
from diffnet.train.recipes import recipe as options_of_recipe
from diffnet.train.tasks.names import TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes

train_app = typer.Typer(help="Train a network on labeled meshes.", no_args_is_help=True)


def _command(task: TaskName) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the command of a task. The shared options get the defaults of the task's recipe."""
    defaults = TrainOptions(task=task, **options_of_recipe("default", task))
    return lambda command: train_app.command(task)(with_shared_options(command, defaults))


@_command("segmentation")
def train_segmentation(
    data: Annotated[str, typer.Option(help="Folder of labeled meshes, or [bold]figures[/], the generated set.")],
    out: RunOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    outputs_at: OutputsAtOption = None,
    label_smoothing: LabelSmoothingOption = 0.0,
    ignore: IgnoreOption = None,
    class_weights: ClassWeightsOption = None,
    **shared: Any,
) -> None:
    """Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C stops the run. The same command with --resume continues after the last complete epoch.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """

    def load() -> "LabeledMeshes":
        from diffnet.data import figures, load_dataset, with_labels_at

        seed, cache = shared["seed"], shared["cache"]
        if data != "figures":
            return load_dataset(data, layout, seed=seed, cache_dir=cache, labels_at=outputs_at)
        return with_labels_at(figures(seed=seed), outputs_at or "vertices")

    _train("segmentation", load, out, _of_classes(shared, label_smoothing, ignore, class_weights))


@_command("classification")
def train_classification(
    data: Annotated[
        str,
        typer.Option(
            help="Folder of classes, a table file,label (.csv), or [bold]shapes[/], the generated set of classes."
        ),
    ],
    out: RunOption,
    label_smoothing: LabelSmoothingOption = 0.2,
    ignore: IgnoreOption = None,
    class_weights: ClassWeightsOption = None,
    **shared: Any,
) -> None:
    """Train a network that classifies whole meshes, and report its results on the test meshes.

    --data holds CLASS/train/ and CLASS/test/, or CLASS/ with meshes, or a table labels.csv with lines file,label or
    file,label,split. Without a split, a random fifth of each class is for testing.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load() -> "LabeledMeshes":
        from diffnet.data import load_classes, shapes

        seed, cache = shared["seed"], shared["cache"]
        return shapes(seed=seed) if data == "shapes" else load_classes(data, seed=seed, cache_dir=cache)

    _train("classification", load, out, _of_classes(shared, label_smoothing, ignore, class_weights))


@_command("regression")
def train_regression(
    data: Annotated[
        Path, typer.Option(help="Folder of meshes with targets, or a table file,COLUMN,… of whole meshes (.csv).")
    ],
    out: RunOption,
    targets: TargetsOption = None,
    loss: LossOption = "mse",
    **shared: Any,
) -> None:
    """Train a network that predicts numbers, and report its results on the test meshes.

    Targets are at vertices, faces or edges, in files beside the meshes (--targets), or belong to whole meshes, in a
    table targets.csv with lines file,COLUMN,… or file,COLUMN,…,split. nan, and an empty cell, is a missing target.

    A folder is divided into training and test meshes by train/ and test/, by train.txt and test.txt, or at random.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load() -> "LabeledMeshes":
        from diffnet.data import load_targets

        return load_targets(data, targets, seed=shared["seed"], cache_dir=shared["cache"])

    _train("regression", load, out, {"targets": targets, "loss": loss, **shared})


def _train(task: TaskName, load: "Callable[[], LabeledMeshes]", out: Path, given: dict[str, Any]) -> None:
    """Run the training of a task.

    given: arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_training

    _follow_recipe(task, given)
    names = {field.name for field in fields(TrainOptions)}
    options = TrainOptions(task=task, **{name: value for name, value in given.items() if name in names})
    cache, resume = given["cache"], given["resume"]
    chosen = pick_device(given["device"])
    if chosen.type == "cpu":
        keep_memory()
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    dataset = load()
    kind = "columns of targets" if task == "regression" else "classes"
    classes = f"{len(dataset.label_names)} {kind}"
    at = "" if dataset.labels_at == "meshes" else f" at the {dataset.labels_at}"
    console.print(f"{len(dataset.train)} meshes to train on, {len(dataset.test)} to test on, {classes}{at}")
    try:
        results = run_training(
            dataset,
            options,
            out,
            device=chosen,
            cache_dir=cache,
            jobs=given["jobs"],
            resume=resume,
            capture=given["capture"],
            console=console,
        )
    except KeyboardInterrupt:
        saved = (out / "last.pt").exists()
        hint = f" {out / 'last.pt'} holds the last complete epoch; --resume continues from it." if saved else ""
        console.print(f"Stopped.{hint}", soft_wrap=True)
        raise typer.Exit(130) from None
    print_results(task, results, out)


def _of_classes(
    shared: dict[str, Any], label_smoothing: float, ignore: list[str] | None, class_weights: str | None
) -> dict[str, Any]:
    """The shared options, and those of tasks with classes."""
    of_classes = {"label_smoothing": label_smoothing, "ignore": tuple(ignore or ()), "class_weights": class_weights}
    return {**of_classes, **shared}


def _follow_recipe(task: TaskName, given: dict[str, Any]) -> None:
    """Give the options of the recipe to all arguments that are not on the command line."""
    context: typer.Context = given["context"]
    named = options_of_recipe(given["recipe"], task)
    chosen = {**TrainOptions(task=task, **named).as_dict(), "laplacian": named.get("laplacian")}
    if given["batch_vertices"] is not None:
        chosen["batch_meshes"] = None  # one limit instead of the other
    for name, value in chosen.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "DEFAULT":
            given[name] = value


def print_results(task: TaskName, results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    from diffnet.train.tasks.registry import task_named

    table, line = task_named(task).summary(results)
    console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
