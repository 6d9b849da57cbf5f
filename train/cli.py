"""The command line: `diffnet train`, `diffnet predict`, `diffnet precompute`, `diffnet info`."""

from __future__ import annotations

import dis
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diffnet.block import DiffusionMode
from diffnet.data import FeatureKind, Layout, Preprocessing, figures, load_dataset
from diffnet.geometry import FORMATS, BasisPrecision, LaplacianKind, diagnose, load_mesh
from diffnet.train.options import Precision, Schedule, TrainBackend, TrainOptions, pick_device

# What draws and writes reports takes a second to import, so the commands that need it do that themselves.

app = typer.Typer(
    help="Learning on surfaces with DiffusionNet: train on labelled meshes, predict on new ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(help="Train a network on labelled meshes.", no_args_is_help=True)
app.add_typer(train_app, name="train")

# What is printed holds names of files and classes: a "[b]" in them is no markup, a ":x:" no emoji.
console = Console(markup=False, emoji=False, highlight=False)


def default_cache() -> Path:
    """The user's folder for caches; that for temporary files where a user has no home."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(tempfile.gettempdir() if folder.startswith("~") else folder) / "diffnet"


DEFAULT_CACHE = default_cache()

CacheOption = Annotated[Path, typer.Option("--cache", help="Folder that keeps preprocessed meshes between runs.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Meshes to preprocess at once; by default one a core.")
]
DeviceOption = Annotated[str, typer.Option(help="auto (the GPU where there is one), cpu, cuda or cuda:N.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="Eigenpairs of the spectral basis.")]
LaplacianOption = Annotated[
    LaplacianKind, typer.Option(help="robust takes any mesh; cotan is that of the original implementation.")
]
BasisOption = Annotated[
    BasisPrecision,
    typer.Option(help="Precision that eigenvectors are kept in; half precision saves a third of the cache."),
]


@train_app.command("segmentation")
def train_segmentation(
    data: Annotated[str, typer.Option(help="Folder of labelled meshes, or [bold]figures[/], the generated set.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics and the report.")],
    layout: Annotated[Layout, typer.Option(help="How the folder is laid out; auto looks.")] = "auto",
    features: Annotated[FeatureKind, typer.Option(help="Inputs at the vertices.")] = "hks",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training meshes.")] = 100,
    width: Annotated[int, typer.Option(min=1, help="Channels inside the network.")] = 128,
    blocks: Annotated[int, typer.Option(min=1, help="DiffusionNet blocks.")] = 4,
    diffusion: Annotated[
        DiffusionMode, typer.Option(help="spectral diffuses in the basis; implicit solves, and needs none.")
    ] = "spectral",
    attention_heads: Annotated[
        int, typer.Option(min=0, help="Heads of attention over one-rings in each block; 0 for none.")
    ] = 0,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout inside the blocks' MLPs.")] = 0.5,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")] = 1e-3,
    schedule: Annotated[
        Schedule, typer.Option(help="step halves the learning rate now and then; cosine lowers it to 0 over the run.")
    ] = "step",
    decay_every: Annotated[int, typer.Option(min=1, help="Epochs between two steps of the schedule.")] = 50,
    batch_meshes: Annotated[int | None, typer.Option(min=1, help="Meshes a step; by default 1.")] = None,
    batch_vertices: Annotated[
        int | None, typer.Option(min=1, help="Instead: as many meshes a step as have N vertices together.")
    ] = None,
    rotate: Annotated[
        bool | None,
        typer.Option("--rotate/--no-rotate", help="Turn meshes at random in training; by default for xyz only."),
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the training meshes set aside to choose the best epoch by.")
    ] = 0.0,
    eval_every: Annotated[int, typer.Option(min=1, help="Epochs between looks at the test set.")] = 5,
    k: Annotated[
        int, typer.Option("--k", min=0, help="Eigenpairs of the spectral basis; 0 with implicit diffusion of xyz.")
    ] = 128,
    laplacian: LaplacianOption = "robust",
    basis: BasisOption = "float32",
    precision: Annotated[Precision, typer.Option(help="auto is bf16 on GPUs that have it, else fp32.")] = "auto",
    backend: Annotated[
        TrainBackend, typer.Option(help="auto computes with the fused kernels on a GPU; torch is plain PyTorch.")
    ] = "auto",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights, order, dropout and splits.")] = 0,
    cache: CacheOption = DEFAULT_CACHE,
    jobs: JobsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    capture: Annotated[
        bool, typer.Option("--capture", help="Record each mesh's step as a CUDA graph: faster where meshes are small.")
    ] = False,
) -> None:
    """Train a segmentation network, and report on the test meshes.

    Writes to --out: last.pt and best.pt (checkpoints), metrics.csv, tensorboard/, and at the end results.json,
    confusion.png, curves.png and predictions.html.

    Ctrl-C stops after the last whole epoch; the same command with --resume goes on from there.
    """
    from diffnet.train.run import check_folder, run_segmentation

    given = locals()
    values = {field.name: given[field.name] for field in fields(TrainOptions)}
    if batch_meshes is None and batch_vertices is None:
        values["batch_meshes"] = 1
    options = TrainOptions(**values)
    chosen = pick_device(device)
    check_folder(out, resume)
    cache.mkdir(parents=True, exist_ok=True)
    dataset = figures(seed=seed) if data == "figures" else load_dataset(data, layout, seed=seed, cache_dir=cache)
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
        there = (out / "last.pt").exists()
        hint = f" {out / 'last.pt'} holds the last whole epoch; --resume goes on from it." if there else ""
        console.print(f"Stopped.{hint}", soft_wrap=True)
        raise typer.Exit(130) from None
    _print_results(results, out)


def _print_results(results: dict[str, Any], out: Path) -> None:
    from diffnet.train.run import percent

    shown = results["classes"]
    table = Table("class", "elements", "accuracy", "IoU")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in shown[:30]:
        table.add_row(row["name"], str(row["count"]), percent(row["accuracy"], 1), percent(row["iou"], 1))
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
    meshes: Annotated[list[Path], typer.Argument(metavar="MESH…", help="obj, off, ply or stl files.")],
    checkpoint: Annotated[Path, typer.Option(help="best.pt or last.pt of a run.")],
    out: Annotated[
        Path, typer.Option(help="Coloured mesh to write (.ply); for several meshes a folder to write them into.")
    ],
    html: Annotated[Path | None, typer.Option(help="Also a page that shows them turning in a browser.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also a picture.")] = None,
    device: DeviceOption = "auto",
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder that keeps preprocessed meshes; by default none.")
    ] = None,
) -> None:
    """Predict labels of meshes with a trained network."""
    from diffnet.train.checkpoint import load_checkpoint
    from diffnet.train.predict import predict_labels, write_predictions

    plys = _plys(meshes, out)
    written = [path for path in (*plys, html, png) if path is not None]
    _check_outputs(written, [*meshes, checkpoint])
    loaded = load_checkpoint(checkpoint)
    predictions = predict_labels(meshes, loaded, pick_device(device), cache)
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_predictions(predictions, loaded["label_names"], loaded["labels_at"], plys=plys, html=html, png=png)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _plys(meshes: list[Path], out: Path) -> list[Path]:
    """For each mesh the file that its prediction is written to."""
    if len(meshes) == 1 and out.suffix.lower() == ".ply":
        return [out]
    if out.suffix and not out.is_dir():
        expected = "a .ply file" if len(meshes) == 1 else f"a folder, since there are {len(meshes)} meshes"
        raise ValueError(f"--out should be {expected}, got {out}")
    return [out / f"{mesh.stem}.ply" for mesh in meshes]


def _check_outputs(written: list[Path], read: list[Path]) -> None:
    """No file is written twice or over one that is read. Raises ValueError."""
    for i, path in enumerate(written):
        if path in written[:i]:
            raise ValueError(f"{path}: two results would be written to this file")
        for source in read:
            if path.exists() and source.exists() and path.samefile(source):
                raise ValueError(f"{path}: {source} would be overwritten by its prediction")


@app.command()
def precompute(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Meshes, or folders searched for meshes.")],
    cache: CacheOption = DEFAULT_CACHE,
    k: KOption = 128,
    laplacian: LaplacianOption = "robust",
    basis: BasisOption = "float32",
    jobs: JobsOption = None,
    device: Annotated[str, typer.Option(help="What solves for eigenvectors: cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Preprocess meshes into the cache, so that training and prediction start at once.

    Positions are normalised first, as training does. A mesh that can't be used doesn't stop the others: it is listed
    at the end, and the exit code is 1.
    """
    from diffnet.train.run import fill_cache_with_bar

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.suffix.lower() in FORMATS and p.is_file())
            files += sorted(p for p in found if not p.name.startswith("."))
        else:
            files.append(path)
    if not files:
        raise ValueError(f"no meshes ({', '.join(FORMATS)}) in {', '.join(map(str, paths))}")
    files = list(dict.fromkeys(files))
    failed = fill_cache_with_bar(
        files, Preprocessing(k, laplacian, basis=basis), cache, jobs, console, pick_device(device)
    )
    console.print(f"{len(files) - len(failed)} of {len(files)} meshes are in {cache}", soft_wrap=True)
    for reason in failed.values():
        _complain(reason)
    if failed:
        raise typer.Exit(1)


@app.command()
def info(mesh: Annotated[Path, typer.Argument(metavar="MESH", help="An obj, off, ply or stl file.")]) -> None:
    """Tell what a mesh is, and what is wrong with it."""
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
    table.add_row("extent", " × ".join(f"{x:.6g}" for x in high - low))
    table.add_row("center", ", ".join(f"{x:.6g}" for x in (high + low) / 2))
    console.print(table)
    if found.faults:
        console.print("wrong with it:")
        for fault in found.faults:
            console.print(f"  {fault}")
    else:
        console.print("nothing wrong with it")


def main() -> None:
    """Run the command line: what a user can mend is one line on stderr and exit code 1."""
    try:
        app()
    except Exception as e:
        if _out_of_memory(e):
            _complain(
                f"out of memory ({e}). In training, a lower --batch-vertices, --batch-meshes or --width takes less"
            )
        elif isinstance(e, OSError) and e.filename is not None:
            _complain(f"{e.filename}: {e.strerror}")
        elif isinstance(e, OSError) or _on_purpose(e):
            _complain(str(e))
        else:
            raise
        sys.exit(1)


def _complain(message: str) -> None:
    print("diffnet:", " ".join(message.split()), file=sys.stderr)


def _out_of_memory(error: Exception) -> bool:
    """Of the machine or of a GPU, for which PyTorch has an error of its own, and for the machine's a message."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _on_purpose(error: Exception) -> bool:
    """Whether a `raise` of this library is where an error comes from, which makes it a message to the user.

    Anything else is a bug and shows itself: an error from another library, or from C called by this one.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_globals.get("__name__", "").startswith("diffnet."):
        return False
    raises = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and isinstance(error, (ValueError, RuntimeError))
