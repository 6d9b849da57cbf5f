"""`diffnet train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import (
    DEFAULT_CACHE,
    AttentionHeadsOption,
    AverageWeightsOption,
    BackendOption,
    BasisOption,
    BatchMeshesOption,
    BatchVerticesOption,
    BlocksOption,
    CacheOption,
    CaptureOption,
    DecayEveryOption,
    DeviceOption,
    DiffusionOption,
    DropoutOption,
    EpochsOption,
    EvalEveryOption,
    FeaturesOption,
    InitialTimesOption,
    JobsOption,
    JoinOption,
    LabelSmoothingOption,
    LaplacianOption,
    LearningRateOption,
    LossOption,
    NormalizationOption,
    NormalizeOption,
    OperatorsOption,
    PrecisionOption,
    RecipeOption,
    ResumeOption,
    RotateOption,
    RunOption,
    ScheduleOption,
    SeedOption,
    TargetsOption,
    TrainKOption,
    ValidationOption,
    WidthOption,
)
from diffnet.train.options import TrainOptions
from diffnet.train.recipes import recipe as options_of_recipe
from diffnet.train.tasks.names import TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes

# The defaults of the commands.
SEGMENTATION = TrainOptions(**options_of_recipe("default", "segmentation"))
CLASSIFICATION = TrainOptions(task="classification", **options_of_recipe("default", "classification"))

train_app = typer.Typer(help="Train a network on labeled meshes.", no_args_is_help=True)


@train_app.command("segmentation")
def train_segmentation(
    context: typer.Context,
    data: Annotated[str, typer.Option(help="Folder of labeled meshes, or [bold]figures[/], the generated set.")],
    out: RunOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    recipe: RecipeOption = "default",
    features: FeaturesOption = SEGMENTATION.features,
    epochs: EpochsOption = SEGMENTATION.epochs,
    width: WidthOption = SEGMENTATION.width,
    blocks: BlocksOption = SEGMENTATION.blocks,
    diffusion: DiffusionOption = SEGMENTATION.diffusion,
    initial_times: InitialTimesOption = SEGMENTATION.initial_times,
    normalization: NormalizationOption = SEGMENTATION.normalization,
    attention_heads: AttentionHeadsOption = SEGMENTATION.attention_heads,
    dropout: DropoutOption = SEGMENTATION.dropout,
    learning_rate: LearningRateOption = SEGMENTATION.learning_rate,
    schedule: ScheduleOption = SEGMENTATION.schedule,
    decay_every: DecayEveryOption = SEGMENTATION.decay_every,
    batch_meshes: BatchMeshesOption = SEGMENTATION.batch_meshes,
    batch_vertices: BatchVerticesOption = SEGMENTATION.batch_vertices,
    rotate: RotateOption = SEGMENTATION.rotate,
    label_smoothing: LabelSmoothingOption = SEGMENTATION.label_smoothing,
    average_weights: AverageWeightsOption = SEGMENTATION.average_weights,
    validation: ValidationOption = SEGMENTATION.validation,
    eval_every: EvalEveryOption = SEGMENTATION.eval_every,
    k: TrainKOption = SEGMENTATION.k,
    laplacian: LaplacianOption = None,
    basis: BasisOption = SEGMENTATION.basis,
    join: JoinOption = SEGMENTATION.join,
    operators: OperatorsOption = SEGMENTATION.operators,
    normalize: NormalizeOption = SEGMENTATION.normalize,
    precision: PrecisionOption = SEGMENTATION.precision,
    backend: BackendOption = SEGMENTATION.backend,
    device: DeviceOption = "auto",
    seed: SeedOption = SEGMENTATION.seed,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: ResumeOption = False,
    capture: CaptureOption = True,
) -> None:
    """Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C stops the run. The same command with --resume continues after the last complete epoch.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """

    def load() -> LabeledMeshes:
        from diffnet.data import figures, load_dataset

        return figures(seed=seed) if data == "figures" else load_dataset(data, layout, seed=seed, cache_dir=cache)

    _train("segmentation", load, locals())


@train_app.command("classification")
def train_classification(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help="Folder of classes, a table file,label (.csv), or [bold]shapes[/], the generated set of classes."
        ),
    ],
    out: RunOption,
    recipe: RecipeOption = "default",
    features: FeaturesOption = CLASSIFICATION.features,
    epochs: EpochsOption = CLASSIFICATION.epochs,
    width: WidthOption = CLASSIFICATION.width,
    blocks: BlocksOption = CLASSIFICATION.blocks,
    diffusion: DiffusionOption = CLASSIFICATION.diffusion,
    initial_times: InitialTimesOption = CLASSIFICATION.initial_times,
    normalization: NormalizationOption = CLASSIFICATION.normalization,
    attention_heads: AttentionHeadsOption = CLASSIFICATION.attention_heads,
    dropout: DropoutOption = CLASSIFICATION.dropout,
    learning_rate: LearningRateOption = CLASSIFICATION.learning_rate,
    schedule: ScheduleOption = CLASSIFICATION.schedule,
    decay_every: DecayEveryOption = CLASSIFICATION.decay_every,
    batch_meshes: BatchMeshesOption = CLASSIFICATION.batch_meshes,
    batch_vertices: BatchVerticesOption = CLASSIFICATION.batch_vertices,
    rotate: RotateOption = CLASSIFICATION.rotate,
    label_smoothing: LabelSmoothingOption = CLASSIFICATION.label_smoothing,
    average_weights: AverageWeightsOption = CLASSIFICATION.average_weights,
    validation: ValidationOption = CLASSIFICATION.validation,
    eval_every: EvalEveryOption = CLASSIFICATION.eval_every,
    k: TrainKOption = CLASSIFICATION.k,
    laplacian: LaplacianOption = None,
    basis: BasisOption = CLASSIFICATION.basis,
    join: JoinOption = CLASSIFICATION.join,
    operators: OperatorsOption = CLASSIFICATION.operators,
    normalize: NormalizeOption = CLASSIFICATION.normalize,
    precision: PrecisionOption = CLASSIFICATION.precision,
    backend: BackendOption = CLASSIFICATION.backend,
    device: DeviceOption = "auto",
    seed: SeedOption = CLASSIFICATION.seed,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: ResumeOption = False,
    capture: CaptureOption = True,
) -> None:
    """Train a network that classifies whole meshes, and report its results on the test meshes.

    --data holds CLASS/train/ and CLASS/test/, or CLASS/ with meshes, or a table labels.csv with lines file,label or
    file,label,split. Without a split, a random fifth of each class is for testing.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load() -> LabeledMeshes:
        from diffnet.data import load_classes, shapes

        return shapes(seed=seed) if data == "shapes" else load_classes(data, seed=seed, cache_dir=cache)

    _train("classification", load, locals())


@train_app.command("regression")
def train_regression(
    data: Annotated[
        Path, typer.Option(help="Folder of meshes with targets, or a table file,COLUMN,… of whole meshes (.csv).")
    ],
    out: RunOption,
    targets: TargetsOption = None,
    loss: LossOption = "mse",
    features: FeaturesOption = "xyz+normals+log-hks",
    epochs: EpochsOption = 100,
    width: WidthOption = 128,
    blocks: BlocksOption = 4,
    diffusion: DiffusionOption = "spectral",
    attention_heads: AttentionHeadsOption = 0,
    dropout: DropoutOption = 0.0,
    learning_rate: LearningRateOption = 0.001,
    schedule: ScheduleOption = "cosine",
    decay_every: DecayEveryOption = 50,
    batch_meshes: BatchMeshesOption = None,
    batch_vertices: BatchVerticesOption = None,
    rotate: RotateOption = None,
    validation: ValidationOption = 0.0,
    eval_every: EvalEveryOption = 5,
    k: TrainKOption = 128,
    laplacian: LaplacianOption = "robust",
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "auto",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: ResumeOption = False,
    capture: CaptureOption = True,
) -> None:
    """Train a network that predicts numbers, and report its results on the test meshes.

    Targets are at vertices, faces or edges, in files beside the meshes (--targets), or belong to whole meshes, in a
    table targets.csv with lines file,COLUMN,… or file,COLUMN,…,split. nan, and an empty cell, is a missing target.

    A folder is divided into training and test meshes by train/ and test/, by train.txt and test.txt, or at random.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load() -> LabeledMeshes:
        from diffnet.data import load_targets

        return load_targets(data, targets, seed=seed, cache_dir=cache)

    _train("regression", load, locals())


def _train(task: TaskName, load: Callable[[], LabeledMeshes], given: dict[str, Any]) -> None:
    """Run the training of a task.

    given: the arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_training

    _follow_recipe(task, given)
    names = {field.name for field in fields(TrainOptions)}
    options = TrainOptions(task=task, **{name: value for name, value in given.items() if name in names})
    out, cache, resume = given["out"], given["cache"], given["resume"]
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


def _follow_recipe(task: TaskName, given: dict[str, Any]) -> None:
    """Give the options of the recipe to all arguments that are not on the command line."""
    context: typer.Context = given["context"]
    chosen = TrainOptions(task=task, **options_of_recipe(given["recipe"], task)).as_dict()
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
