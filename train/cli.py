"""The command line: `diffnet train`, `diffnet predict`, `diffnet precompute`, `diffnet info`.

`--help` and mistakes on the command line should answer at once. So the top of this file imports neither PyTorch nor
SciPy, and each command imports what it runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diffnet.data.feature_names import FEATURE_CHANNELS, canonical_features
from diffnet.data.folders.layouts import Layout
from diffnet.data.options import Preprocessing
from diffnet.geometry.errors import DiffnetError, OptionError
from diffnet.geometry.mesh.mesh import FORMATS, mesh_stem, mesh_suffix
from diffnet.geometry.preprocessing.options import BasisPrecision, JoinRule, LaplacianKind
from diffnet.interrupts import ExitAtCtrlC
from diffnet.train.options import DiffusionMode, Precision, Schedule, TrainBackend, TrainOptions

app = typer.Typer(
    help="Learning on surfaces with DiffusionNet: train on labeled meshes, predict on new ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(help="Train a network on labeled meshes.", no_args_is_help=True)
app.add_typer(train_app, name="train")

# Printed text holds names of files and classes. Markup is off, because "[b]" and ":x:" in a name are plain text.
console = Console(markup=False, emoji=False, highlight=False)


def default_cache() -> Path:
    """The `diffnet` folder in the user's cache folder, or in the temporary folder if the user has no home."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(tempfile.gettempdir() if folder.startswith("~") else folder) / "diffnet"


DEFAULT_CACHE = default_cache()

MESH_FILES = f"{', '.join(suffix[1:] for suffix in FORMATS[:-1])} or {FORMATS[-1][1:]}, also with .gz"

CacheOption = Annotated[Path, typer.Option("--cache", help="Folder that keeps preprocessed meshes between runs.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Meshes to preprocess at once. By default, one per core.")
]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="Number of eigenpairs of the spectral basis.")]
LaplacianOption = Annotated[
    LaplacianKind, typer.Option(help="robust accepts any mesh; cotan is the original implementation's.")
]
BasisOption = Annotated[
    BasisPrecision,
    typer.Option(help="Storage precision of eigenvectors. Half precision makes the cache a third smaller."),
]


def checked_features(text: str) -> str:
    """The features with their parts in canonical order. Raises BadParameter for an unknown or repeated part."""
    try:
        return canonical_features(text)
    except OptionError as e:
        raise typer.BadParameter(str(e)) from e


FeaturesOption = Annotated[
    str,
    typer.Option(
        callback=checked_features,
        metavar="PART+PART…",
        help=f"Input features at the vertices: {', '.join(FEATURE_CHANNELS)} and file:NAME, one or several joined by +."
        " file:NAME is NAME/MESH.npy, MESH.NAME.npy, or the mesh file's own colors or property NAME.",
    ),
]
JoinOption = Annotated[
    JoinRule,
    typer.Option(help="Join vertices at the same position: auto does where this connects most of the mesh."),
]


@train_app.command("segmentation")
def train_segmentation(
    data: Annotated[str, typer.Option(help="Folder of labeled meshes, or [bold]figures[/], the generated set.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics and the report.")],
    layout: Annotated[Layout, typer.Option(help="Layout of the folder; auto detects it.")] = "auto",
    features: FeaturesOption = "hks",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training meshes.")] = 100,
    width: Annotated[int, typer.Option(min=1, help="Channels inside the network.")] = 128,
    blocks: Annotated[int, typer.Option(min=1, help="DiffusionNet blocks.")] = 4,
    diffusion: Annotated[
        DiffusionMode, typer.Option(help="spectral uses the eigenbasis; implicit solves a linear system.")
    ] = "spectral",
    attention_heads: Annotated[
        int, typer.Option(min=0, help="Heads of attention over one-rings in each block, or 0.")
    ] = 0,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout inside the blocks' MLPs.")] = 0.5,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")] = 1e-3,
    schedule: Annotated[
        Schedule, typer.Option(help="step halves the learning rate every --decay-every epochs; cosine lowers it to 0.")
    ] = "step",
    decay_every: Annotated[int, typer.Option(min=1, help="Epochs between two steps of the step schedule.")] = 50,
    batch_meshes: Annotated[int | None, typer.Option(min=1, help="Meshes per step. The default is 1.")] = None,
    batch_vertices: Annotated[
        int | None, typer.Option(min=1, help="Instead of a number of meshes: at most N vertices per step.")
    ] = None,
    rotate: Annotated[
        bool | None,
        typer.Option("--rotate/--no-rotate", help="Rotate xyz and normals at random in training. Default: yes."),
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the training meshes held out to choose the best epoch.")
    ] = 0.0,
    eval_every: Annotated[int, typer.Option(min=1, help="Epochs between evaluations of the test set.")] = 5,
    k: Annotated[
        int, typer.Option("--k", min=0, help="Number of eigenpairs; 0 is allowed for implicit diffusion of xyz.")
    ] = 128,
    laplacian: LaplacianOption = "robust",
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    precision: Annotated[Precision, typer.Option(help="auto is bf16 on GPUs that support it, else fp32.")] = "auto",
    backend: Annotated[
        TrainBackend, typer.Option(help="auto uses the fused kernels on a GPU; torch is plain PyTorch.")
    ] = "auto",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights, order of meshes, dropout and splits.")] = 0,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    capture: Annotated[
        bool, typer.Option(help="On a GPU, launch the kernels of a step together as a CUDA graph.")
    ] = True,
) -> None:
    """Train a segmentation network, and report its results on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C stops the run. The same command with --resume continues after the last complete epoch.

    A run locks its folder. On network file systems without locks, start only one run in a folder.
    """
    with ExitAtCtrlC():
        from diffnet.data import load_dataset
        from diffnet.train.device import keep_memory, pick_device
        from diffnet.train.run import check_folder, run_segmentation

    if batch_meshes is None and batch_vertices is None:
        batch_meshes = 1
    options = TrainOptions(
        features=features,
        k=k,
        laplacian=laplacian,
        basis=basis,
        join=join,
        epochs=epochs,
        width=width,
        blocks=blocks,
        diffusion=diffusion,
        attention_heads=attention_heads,
        dropout=dropout,
        learning_rate=learning_rate,
        schedule=schedule,
        decay_every=decay_every,
        batch_meshes=batch_meshes,
        batch_vertices=batch_vertices,
        rotate=rotate,
        validation=validation,
        eval_every=eval_every,
        precision=precision,
        backend=backend,
        seed=seed,
    )
    chosen = pick_device(device)
    if chosen.type == "cpu":
        keep_memory()
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    if data == "figures":
        from diffnet.data import figures

        dataset = figures(seed=seed)
    else:
        dataset = load_dataset(data, layout, seed=seed, cache_dir=cache)
    console.print(
        f"{len(dataset.train)} meshes to train on, {len(dataset.test)} to test on, "
        f"{len(dataset.label_names)} classes at the {dataset.labels_at}"
    )
    try:
        results = run_segmentation(
            dataset,
            options,
            out,
            device=chosen,
            cache_dir=cache,
            jobs=jobs,
            resume=resume,
            capture=capture,
            console=console,
        )
    except KeyboardInterrupt:
        saved = (out / "last.pt").exists()
        hint = f" {out / 'last.pt'} holds the last complete epoch; --resume continues from it." if saved else ""
        console.print(f"Stopped.{hint}", soft_wrap=True)
        raise typer.Exit(130) from None
    _print_results(results, out)


def _print_results(results: dict[str, Any], out: Path) -> None:
    from diffnet.train.metrics import percent

    shown = results["classes"]
    table = Table("class", "elements", "accuracy", "IoU")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in shown[:30]:
        table.add_row(row["name"], str(row["count"]), percent(row["accuracy"]), percent(row["iou"]))
    if len(shown) > 30:
        table.add_row(f"… {len(shown) - 30} more in results.json", "", "", "")
    console.print(table)
    console.print(
        f"test accuracy {percent(results['test_accuracy'], 2)}, mean IoU {percent(results['mean_iou'], 2)}; "
        f"see {out / 'predictions.html'}",
        soft_wrap=True,
    )


@app.command()
def predict(
    meshes: Annotated[list[Path], typer.Argument(metavar="MESH…", help=f"{MESH_FILES} files.")],
    checkpoint: Annotated[Path, typer.Option(help="best.pt or last.pt of a run, or a file of DiffusionNet.save.")],
    out: Annotated[
        Path, typer.Option(help="Colored mesh to write (.ply). For several meshes, a folder to write them to.")
    ],
    html: Annotated[Path | None, typer.Option(help="Also write an interactive page for a browser.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write a picture.")] = None,
    device: DeviceOption = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder that keeps preprocessed meshes. By default, none is kept.")
    ] = None,
) -> None:
    """Predict the labels of meshes with a trained network."""
    with ExitAtCtrlC():
        from diffnet import DiffusionNet
        from diffnet.train.device import pick_device
        from diffnet.train.network_input import MetadataError, network_input
        from diffnet.train.predict import predict_labels, write_predictions

    plys = _plys(meshes, out)
    written = [path for path in (*plys, html, png) if path is not None]
    _check_outputs(written, [*meshes, checkpoint])
    network = DiffusionNet.load(checkpoint)
    try:
        expected = network_input(network)
    except MetadataError as e:
        raise MetadataError(f"{checkpoint}: {e}") from e
    predictions = predict_labels(meshes, network, pick_device(device), cache)
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_predictions(predictions, expected.label_names, expected.labels_at, plys=plys, html=html, png=png)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _plys(meshes: list[Path], out: Path) -> list[Path]:
    """The file to write for each mesh. Raises OptionError if --out does not fit the number of meshes."""
    if len(meshes) == 1 and out.suffix.lower() == ".ply":
        return [out]
    if out.suffix and not out.is_dir():
        expected = "a .ply file" if len(meshes) == 1 else f"a folder, since there are {len(meshes)} meshes"
        raise OptionError(f"--out should be {expected}, got {out}")
    return [out / f"{mesh_stem(mesh)}.ply" for mesh in meshes]


def _check_outputs(written: list[Path], read: list[Path]) -> None:
    """Raises OptionError if a file would be written twice, or would overwrite an input."""
    for i, path in enumerate(written):
        if path in written[:i]:
            raise OptionError(f"{path}: two results would be written to this file")
        for source in read:
            if path.exists() and source.exists() and path.samefile(source):
                raise OptionError(f"{path}: {source} would be overwritten by its prediction")


@app.command()
def precompute(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Meshes, or folders to search for meshes.")],
    cache: CacheOption = DEFAULT_CACHE,
    k: KOption = 128,
    laplacian: LaplacianOption = "robust",
    basis: BasisOption = "float32",
    join: JoinOption = "auto",
    jobs: JobsOption = None,
    device: Annotated[str, typer.Option(help="Device that computes eigenvectors: cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Preprocess meshes into the cache, so that training and prediction start at once.

    Positions are normalized first, as in training. A mesh that can't be used does not stop the others. It is listed at
    the end, and the exit code is 1.
    """
    with ExitAtCtrlC():
        from diffnet.train.device import pick_device
        from diffnet.train.run import fill_cache_with_bar

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = (p for p in path.rglob("*") if _is_mesh(p.name) and p.is_file())
            files += sorted(p for p in found if not p.name.startswith("."))
        else:
            files.append(path)
    if not files:
        raise OptionError(f"no meshes ({', '.join(FORMATS)}, also with .gz) in {', '.join(map(str, paths))}")
    files = list(dict.fromkeys(files))
    failed = fill_cache_with_bar(
        files, Preprocessing(k, laplacian, basis=basis, join=join), cache, jobs, console, pick_device(device)
    )
    console.print(f"{len(files) - len(failed)} of {len(files)} meshes are in {cache}", soft_wrap=True)
    for reason in failed.values():
        _complain(reason)
    if failed:
        raise typer.Exit(1)


def _is_mesh(name: str) -> bool:
    return mesh_suffix(name) in FORMATS


@app.command()
def info(mesh: Annotated[Path, typer.Argument(metavar="MESH", help=f"A file: {MESH_FILES}.")]) -> None:
    """Show the size of a mesh and list its faults."""
    with ExitAtCtrlC():
        from diffnet.geometry import diagnose, load_mesh

    loaded = load_mesh(mesh)
    found = diagnose(loaded)
    table = Table(show_header=False, box=None)
    low, high = loaded.verts.min(axis=0), loaded.verts.max(axis=0)
    table.add_row("kind", "point cloud" if loaded.is_point_cloud else "triangle mesh")
    table.add_row("vertices", str(found.vertices))
    if not loaded.is_point_cloud:
        table.add_row("faces", str(found.faces))
        table.add_row("edges", f"{found.edges}, {found.boundary_edges} of them on the boundary")
        table.add_row("components", str(found.components))
        table.add_row("Euler characteristic", str(found.euler))
        table.add_row("area", f"{found.area:.6g}")
    if found.coincident_vertices:
        table.add_row("coincident vertices", f"{found.coincident_vertices}, {_joined(found.joined_by_default)}")
    table.add_row("extent", " × ".join(f"{x:.6g}" for x in high - low))
    table.add_row("center", ", ".join(f"{x:.6g}" for x in (high + low) / 2))
    console.print(table)
    if found.faults:
        console.print("faults:")
        for fault in found.faults:
            console.print(f"  {fault}")
    else:
        console.print("no faults found")


def _joined(count: int) -> str:
    return f"{count} of them joined by default" if count else "not joined by default; --join always joins them"


def main() -> None:
    """Run the command line.

    An error that the user can fix prints one line on stderr, and the exit code is 1. Any other error is a bug, and
    shows its traceback.
    """
    try:
        app()
    except Exception as error:
        message = _user_message(error)
        if message is None:
            raise
        _complain(message)
        sys.exit(1)


def _complain(message: str) -> None:
    print("diffnet:", " ".join(message.split()), file=sys.stderr)


def _user_message(error: Exception) -> str | None:
    """The message of an error that the user can fix. None for a bug."""
    if isinstance(error, DiffnetError):
        return str(error)
    if isinstance(error, OSError):
        return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    # PyTorch has an error class for a GPU that is out of memory, but only a message for the main memory.
    torch = sys.modules.get("torch")  # if the error is PyTorch's, PyTorch is loaded
    exhausted = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, exhausted) or "can't allocate memory" in str(error):
        return f"out of memory ({error}). In training, lower --batch-vertices, --batch-meshes or --width"
    return None
