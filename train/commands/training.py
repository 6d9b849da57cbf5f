"""`diffnet train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffnet.data.folders.layouts import Layout
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.commands.console import console
from diffnet.train.commands.options import (
    DEFAULT_CACHE,
    AttentionHeadsOption,
    BackendOption,
    BaseOption,
    BasisOption,
    BatchMeshesOption,
    BatchPairsOption,
    BatchVerticesOption,
    BlocksOption,
    CacheOption,
    CaptureOption,
    ChannelsOption,
    DecayEveryOption,
    DeviceOption,
    DiffusionOption,
    DropoutOption,
    EpochsOption,
    EvalEveryOption,
    FeaturesOption,
    JobsOption,
    JoinOption,
    LabelSmoothingOption,
    LaplacianOption,
    LearningRateOption,
    LossOption,
    MapKOption,
    MethodOption,
    NormalizeOption,
    OperatorsOption,
    PairEpochsOption,
    PairFeaturesOption,
    PairKOption,
    PairsOption,
    PrecisionOption,
    ResumeOption,
    RotateOption,
    RunOption,
    ScheduleOption,
    SeedOption,
    TargetsOption,
    TrainKOption,
    ValidationOption,
    WidthOption,
    ZoomOutOption,
)
from diffnet.train.options import Method, TrainOptions
from diffnet.train.tasks.names import TaskName

if TYPE_CHECKING:
    from diffnet.data import LabeledMeshes, MeshPairs

train_app = typer.Typer(help="Train a network on labeled meshes.", no_args_is_help=True)

# Those of Donati et al. 2020 with the network of Sharp et al. 2022, and of Cao et al. 2023.
PAIR_DEFAULTS: dict[Method, dict[str, Any]] = {
    "supervised": {"features": "hks", "k": 128, "map_k": 30, "channels": 128},
    "unsupervised": {"features": "wks", "k": 200, "map_k": 200, "channels": 256},
}
TRAINED_PAIRS = 10_000  # in all epochs together, by default


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
    label_smoothing: LabelSmoothingOption = 0.0,
    validation: ValidationOption = 0.0,
    eval_every: EvalEveryOption = 5,
    k: TrainKOption = 128,
    laplacian: LaplacianOption = None,
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    operators: OperatorsOption = "diffnet",
    normalize: NormalizeOption = "radius",
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
    label_smoothing: LabelSmoothingOption = 0.2,
    validation: ValidationOption = 0.0,
    eval_every: EvalEveryOption = 5,
    k: TrainKOption = 128,
    laplacian: LaplacianOption = None,
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    operators: OperatorsOption = "diffnet",
    normalize: NormalizeOption = "radius",
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
    laplacian: LaplacianOption = None,
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    operators: OperatorsOption = "diffnet",
    normalize: NormalizeOption = "radius",
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


@train_app.command("correspondence")
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
    features: PairFeaturesOption = None,
    channels: ChannelsOption = None,
    map_k: MapKOption = None,
    zoomout: ZoomOutOption = False,
    epochs: PairEpochsOption = None,
    width: WidthOption = 128,
    blocks: BlocksOption = 4,
    diffusion: DiffusionOption = "spectral",
    attention_heads: AttentionHeadsOption = 0,
    dropout: DropoutOption = 0.0,
    learning_rate: LearningRateOption = 0.001,
    schedule: ScheduleOption = "cosine",
    decay_every: DecayEveryOption = 50,
    batch_meshes: BatchPairsOption = 1,
    batch_vertices: BatchVerticesOption = None,
    rotate: RotateOption = None,
    eval_every: EvalEveryOption = 1,
    k: PairKOption = None,
    laplacian: LaplacianOption = None,
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    operators: OperatorsOption = "diffnet",
    normalize: NormalizeOption = "area",
    precision: PrecisionOption = "fp32",
    backend: BackendOption = "auto",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: ResumeOption = False,
    capture: CaptureOption = True,
) -> None:
    """Train a network whose features match pairs of meshes, and report the geodesic errors of the test pairs.

    The network is trained on functional maps. supervised needs correspondences: .vts files or template points for each
    mesh, or a map for each pair. unsupervised needs none.

    Writes to --out what `diffnet train segmentation` writes, with errors.csv, errors.png and a page for each of some
    pairs. For Ctrl-C and --resume, see there.
    """

    def load() -> MeshPairs:
        from diffnet.data import figure_pairs, load_pairs

        if data == ["figures"]:
            return figure_pairs(seed=seed, jobs=jobs, cache_dir=cache)
        return load_pairs(data if len(data) > 1 else data[0], pairs, base=base, seed=seed, cache_dir=cache)

    given = locals()
    for name, value in PAIR_DEFAULTS[method].items():
        given[name] = value if given[name] is None else given[name]
    if map_k is None:
        given["map_k"] = min(given["map_k"], given["k"])
    _train("correspondence", load, given)


def _train(task: TaskName, load: Callable[[], LabeledMeshes | MeshPairs], given: dict[str, Any]) -> None:
    """Run the training of a task.

    given: the arguments of the command. Those that have the name of an option of `TrainOptions` become this option.
    """
    with ExitAtCtrlC():
        from diffnet.data import MeshPairs
        from diffnet.train.correspondence.scoring import as_labeled
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_training

    if given["batch_meshes"] is None and given["batch_vertices"] is None:
        given["batch_meshes"] = 1
    names = {field.name for field in fields(TrainOptions)}
    own = {name: value for name, value in given.items() if name in names and value is not None}
    options = TrainOptions(task=task, **own)
    out, cache, resume = given["out"], given["cache"], given["resume"]
    chosen = pick_device(given["device"])
    if chosen.type == "cpu":
        keep_memory()
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    dataset, pairs = load(), None
    if isinstance(dataset, MeshPairs):
        pairs, dataset = dataset, as_labeled(dataset, given["channels"])
        if given["epochs"] is None:
            options = replace(options, epochs=max(1, round(TRAINED_PAIRS / len(pairs.train_pairs))))
        console.print(f"{len(pairs.train_pairs)} pairs to train on, {len(pairs.test_pairs)} to test on")
    kind = {"regression": "columns of targets", "correspondence": "features"}.get(task, "classes")
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
            pairs=pairs,
        )
    except KeyboardInterrupt:
        saved = (out / "last.pt").exists()
        hint = f" {out / 'last.pt'} holds the last complete epoch; --resume continues from it." if saved else ""
        console.print(f"Stopped.{hint}", soft_wrap=True)
        raise typer.Exit(130) from None
    print_results(task, results, out)


def print_results(task: TaskName, results: dict[str, Any], out: Path) -> None:
    """Print the scores of a task, from the content of results.json."""
    from diffnet.train.tasks.registry import task_named

    table, line = task_named(task).summary(results)
    console.print(table)
    console.print(f"{line}; see {out / 'predictions.html'}", soft_wrap=True)
