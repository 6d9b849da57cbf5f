"""`diffnet train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from diffnet.data.folders.layouts import Layout
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import (
    DEFAULT_CACHE,
    AttentionHeadsOption,
    BackendOption,
    BasisOption,
    BatchMeshesOption,
    BatchVerticesOption,
    BlocksOption,
    CacheOption,
    CaptureOption,
    CutOption,
    DecayEveryOption,
    DecimateOption,
    DeviceOption,
    DiffusionOption,
    DropoutOption,
    EpochsOption,
    EvalEveryOption,
    FeaturesOption,
    JitterOption,
    JobsOption,
    JoinOption,
    LabelSmoothingOption,
    LaplacianOption,
    LearningRateOption,
    MirrorOption,
    PrecisionOption,
    ResumeOption,
    RotateAboutOption,
    RotateOption,
    RunOption,
    ScaleRangeOption,
    ScheduleOption,
    SeedOption,
    TrainKOption,
    ValidationOption,
    VariantsOption,
    WidthOption,
)
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.names import TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes

train_app = typer.Typer(help="Train a network on labeled meshes.", no_args_is_help=True)


@train_app.command("segmentation")
def train_segmentation(
    data: Annotated[str, typer.Option(help="Folder of labeled meshes, or [bold]figures[/], the generated set.")],
    out: RunOption,
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    features: FeaturesOption = "hks",
    epochs: EpochsOption = 100,
    width: WidthOption = 128,
    blocks: BlocksOption = 4,
    diffusion: DiffusionOption = "spectral",
    attention_heads: AttentionHeadsOption = 0,
    dropout: DropoutOption = 0.5,
    learning_rate: LearningRateOption = 0.001,
    schedule: ScheduleOption = "step",
    decay_every: DecayEveryOption = 50,
    batch_meshes: BatchMeshesOption = None,
    batch_vertices: BatchVerticesOption = None,
    rotate: RotateOption = None,
    rotate_about: RotateAboutOption = "any",
    scale_range: ScaleRangeOption = 1.0,
    jitter: JitterOption = 0.0,
    mirror: MirrorOption = False,
    cut: CutOption = 0.0,
    decimate: DecimateOption = 0.0,
    variants: VariantsOption = 8,
    label_smoothing: LabelSmoothingOption = 0.0,
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
    data: Annotated[
        str,
        typer.Option(
            help="Folder of classes, a table file,label (.csv), or [bold]shapes[/], the generated set of classes."
        ),
    ],
    out: RunOption,
    features: FeaturesOption = "hks",
    epochs: EpochsOption = 100,
    width: WidthOption = 128,
    blocks: BlocksOption = 4,
    diffusion: DiffusionOption = "spectral",
    attention_heads: AttentionHeadsOption = 0,
    dropout: DropoutOption = 0.5,
    learning_rate: LearningRateOption = 0.001,
    schedule: ScheduleOption = "step",
    decay_every: DecayEveryOption = 50,
    batch_meshes: BatchMeshesOption = None,
    batch_vertices: BatchVerticesOption = None,
    rotate: RotateOption = None,
    rotate_about: RotateAboutOption = "any",
    scale_range: ScaleRangeOption = 1.0,
    jitter: JitterOption = 0.0,
    mirror: MirrorOption = False,
    cut: CutOption = 0.0,
    decimate: DecimateOption = 0.0,
    variants: VariantsOption = 8,
    label_smoothing: LabelSmoothingOption = 0.2,
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
    """Train a network that classifies whole meshes, and report its results on the test meshes.

    --data holds CLASS/train/ and CLASS/test/, or CLASS/ with meshes, or a table labels.csv with lines file,label or
    file,label,split. Without a split, a random fifth of each class is for testing.

    For --out, Ctrl-C and --resume, see `diffnet train segmentation`.
    """

    def load() -> LabeledMeshes:
        from diffnet.data import load_classes, shapes

        return shapes(seed=seed) if data == "shapes" else load_classes(data, seed=seed, cache_dir=cache)

    _train("classification", load, locals())


def _train(task: TaskName, load: Callable[[], LabeledMeshes], given: dict[str, Any]) -> None:
    """Run the training of a task.

    given: the arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_training

    if given["batch_meshes"] is None and given["batch_vertices"] is None:
        given["batch_meshes"] = 1
    names = {field.name for field in fields(TrainOptions)}
    options = TrainOptions(task=task, **{name: value for name, value in given.items() if name in names})
    out, cache, resume = given["out"], given["cache"], given["resume"]
    chosen = pick_device(given["device"])
    if chosen.type == "cpu":
        keep_memory()
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    dataset = load()
    classes = f"{len(dataset.label_names)} classes"
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
    print_results(results, out)


def print_results(results: dict[str, Any], out: Path) -> None:
    """Print the scores of each class and of all of them, from the content of results.json."""
    from diffnet.train.metrics import percent

    shown = results["classes"]
    segments = "mean_iou" in results
    table = Table("class", "elements" if segments else "meshes", "accuracy", "IoU")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in shown[:30]:
        table.add_row(row["name"], str(row["count"]), percent(row["accuracy"]), percent(row["iou"]))
    if len(shown) > 30:
        table.add_row(f"… {len(shown) - 30} more in results.json", "", "", "")
    console.print(table)
    iou = f", mean IoU {percent(results['mean_iou'], 2)}" if segments else ""
    console.print(
        f"test accuracy {percent(results['test_accuracy'], 2)}, balanced accuracy "
        f"{percent(results['balanced_accuracy'], 2)}{iou}; see {out / 'predictions.html'}",
        soft_wrap=True,
    )
