"""`diffnet train`. Typer reads the annotations of the commands, so they are not strings."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import (
    AlignOption,
    BaseOption,
    BatchPairsOption,
    ChannelsOption,
    ClassWeightsOption,
    FeatureScaleOption,
    IgnoreOption,
    LabelSmoothingOption,
    LossOption,
    MapKOption,
    MethodOption,
    OutputsAtOption,
    PairEpochsOption,
    PairFeaturesOption,
    PairKOption,
    PairsOption,
    RunOption,
    TargetsOption,
    ZoomOutOption,
)
from diffnet.train.commands.shared_options import with_shared_options
from diffnet.train.options import TrainOptions
from diffnet.train.recipes import CHANNELS
from diffnet.train.recipes import recipe as options_of_recipe
from diffnet.train.tasks.task_options import TASK_OPTIONS, TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes, MeshPairs
    from diffnet.train.tasks.task import Task

train_app = typer.Typer(help="Train a network on meshes.", no_args_is_help=True)

TRAINED_PAIRS = 10_000  # of a correspondence in all epochs together, by default


def _command(task: TaskName, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the command of a task. The shared options get the defaults of the task's recipe.

    without: shared options that the command doesn't have, besides those that the task refuses, and those that its own
        parameters replace
    """
    defaults = TrainOptions(task=task, **options_of_recipe("default", task))
    left_out = (*TASK_OPTIONS[task].unavailable, *without)
    return lambda command: train_app.command(task)(with_shared_options(command, defaults, left_out))


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


@_command("correspondence", ("variants", "features", "k", "epochs", "batch_meshes"))
def train_correspondence(
    data: Annotated[
        list[str],
        typer.Option(
            help="Folder of meshes in pairs, also several times, or [bold]figures[/], the generated set of pairs."
        ),
    ],
    out: RunOption,
    method: MethodOption = "supervised",
    pairs: PairsOption = None,
    base: BaseOption = "auto",
    features: PairFeaturesOption = "curvature+log-hks",
    channels: ChannelsOption = None,
    map_k: MapKOption = 100,
    k: PairKOption = 128,
    feature_scale: FeatureScaleOption = 3.0,
    align: AlignOption = False,
    zoomout: ZoomOutOption = False,
    epochs: PairEpochsOption = None,
    batch_meshes: BatchPairsOption = 1,
    **shared: Any,
) -> None:
    """Train a network whose features match pairs of meshes, and report the geodesic errors of the test pairs.

    The network is trained on functional maps. supervised needs correspondences: .vts files or template points for each
    mesh, or a map for each pair. unsupervised needs none.

    Writes to --out what `diffnet train segmentation` writes, with errors.csv, errors.png and pages of some pairs. For
    Ctrl-C and --resume, see there.
    """

    def load() -> "MeshPairs":
        from diffnet.data import figure_pairs, load_pairs

        seed, cache = shared["seed"], shared["cache"]
        if data == ["figures"]:
            return figure_pairs(seed=seed, jobs=shared["jobs"], cache_dir=cache)
        return load_pairs(data if len(data) > 1 else data[0], pairs, base=base, seed=seed, cache_dir=cache)

    own = {"method": method, "features": features, "map_k": map_k, "k": k, "feature_scale": feature_scale}
    own |= {"align": align, "zoomout": zoomout, "channels": channels, "epochs": epochs, "batch_meshes": batch_meshes}
    _train("correspondence", load, out, {**own, **shared})


def _train(name: TaskName, load: "Callable[[], LabeledMeshes | MeshPairs]", out: Path, given: dict[str, Any]) -> None:
    """Run the training of a task.

    given: arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.data import MeshPairs
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_training
        from diffnet.train.tasks.registry import task_named

    _follow_recipe(name, given)
    task = task_named(name)
    names = {field.name for field in fields(TrainOptions)}
    options = TrainOptions(task=name, **{option: value for option, value in given.items() if option in names})
    cache, resume = given["cache"], given["resume"]
    chosen = pick_device(given["device"])
    if chosen.type == "cpu":
        keep_memory()
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    dataset, pairs = load(), None
    if isinstance(dataset, MeshPairs):
        assert task.pairs is not None
        pairs, dataset = dataset, task.pairs.as_labeled(dataset, given["channels"] or CHANNELS[options.method])
        if _is_default("epochs", given):
            options = replace(options, epochs=max(1, round(TRAINED_PAIRS / len(pairs.train_pairs))))
        console.print(f"{len(pairs.train_pairs)} pairs to train on, {len(pairs.test_pairs)} to test on")
    outputs = f"{len(dataset.label_names)} {task.outputs}"
    at = "" if dataset.labels_at == "meshes" else f" at the {dataset.labels_at}"
    console.print(f"{len(dataset.train)} meshes to train on, {len(dataset.test)} to test on, {outputs}{at}")
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
            pairs=pairs,
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
    named = options_of_recipe(given["recipe"], task, given.get("method", "supervised"))
    chosen = {**TrainOptions(task=task, **named).as_dict(), "laplacian": named.get("laplacian")}
    if given["batch_vertices"] is not None:
        chosen["batch_meshes"] = None  # one limit instead of the other
    for name, value in chosen.items():
        if _is_default(name, given):
            given[name] = value
    if _is_default("map_k", given):
        given["map_k"] = min(given["map_k"], given["k"])


def _is_default(name: str, given: dict[str, Any]) -> bool:
    """Whether an argument of the command is not on the command line."""
    context: typer.Context = given["context"]
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def print_results(task: "Task", results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    table, line = task.summary(results)
    console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
