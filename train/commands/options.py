"""Options that several commands share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from diffnet.data.feature_names import FEATURE_CHANNELS, canonical_features, target_parts
from diffnet.data.pairs.indices import Base
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import FORMATS
from diffnet.geometry.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    ScaleRule,
)
from diffnet.train.tasks.options.shared import Precision, RotationAxis, Schedule, TrainBackend
from diffnet.train.tasks.options.task_options import RecipeName


def default_cache() -> Path:
    """The `diffnet` folder in the user's cache folder, or in the temporary folder if the user has no home."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(tempfile.gettempdir() if folder.startswith("~") else folder) / "diffnet"


def checked_features(text: str | None) -> str | None:
    """The features with their parts in canonical order. Raises BadParameter for an unknown or repeated part."""
    try:
        return text if text is None else canonical_features(text)
    except OptionError as e:
        raise typer.BadParameter(str(e)) from e


def checked_targets(text: str | None) -> str | None:
    """The text unchanged. Raises BadParameter if it doesn't name targets."""
    try:
        return text if text is None or target_parts(text) else None
    except OptionError as e:
        raise typer.BadParameter(str(e)) from e


DEFAULT_CACHE = default_cache()

MESH_FILES = f"{', '.join(suffix[1:] for suffix in FORMATS[:-1])} or {FORMATS[-1][1:]}, also with .gz"

CacheOption = Annotated[Path, typer.Option("--cache", help="Folder that keeps preprocessed meshes between runs.")]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Meshes to preprocess at once. By default, one per core.")
]
MemoryOption = Annotated[
    float,
    typer.Option("--memory", min=0.01, metavar="GIB", help="Memory of the host for samples that don't fit on the GPU."),
]
DeviceOption = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="Number of eigenpairs of the spectral basis.")]
LaplacianOption = Annotated[
    LaplacianKind | None,
    typer.Option(help="robust, the default, accepts any mesh; cotan is the one of --operators original."),
]
OperatorsOption = Annotated[
    OperatorsKind,
    typer.Option(help="original has the operators of the original implementation, with its regularization."),
]
NormalizeOption = Annotated[
    ScaleRule,
    typer.Option(help="Scale meshes to radius 1 or to area 1. all-radius and all-area count vertices of no face, too."),
]
BasisOption = Annotated[
    BasisPrecision,
    typer.Option(help="Storage precision of eigenvectors. Half precision makes the cache a third smaller."),
]
JoinOption = Annotated[
    JoinRule,
    typer.Option(help="Join vertices at the same position: auto does where this connects most of the mesh."),
]

RecipeOption = Annotated[
    RecipeName,
    typer.Option(help="original: features, network and training of the original implementation. Other options win."),
]
# The options of `diffnet train`. Each is an option of `TrainOptions`, except the last ones.
RunOption = Annotated[Path, typer.Option(help="Folder for checkpoints, metrics and the report.")]
FeaturesOption = Annotated[
    str,
    typer.Option(
        callback=checked_features,
        metavar="PART+PART…",
        help=f"Input features at the vertices: {', '.join(FEATURE_CHANNELS)} and file:NAME, one or several joined by +."
        " file:NAME is NAME/MESH.npy, MESH.NAME.npy or NAME in a PLY or VTK file; file:colors is the colors of "
        "the vertices of a PLY, OBJ or OFF file. vector:NAME turns with the mesh, and scalar:NAME doesn't.",
    ),
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        callback=checked_targets,
        metavar="file:NAME",
        help="Targets at vertices, faces or edges: MESH.NAME or NAME/MESH with .npy, .txt or .csv, or the property "
        "NAME of a PLY file. Several are joined by +. By default, a table targets.csv has the targets of whole meshes.",
    ),
]
EpochsOption = Annotated[int, typer.Option(min=1, help="Passes over the training meshes.")]
LearningRateOption = Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")]
ScheduleOption = Annotated[
    Schedule, typer.Option(help="step halves the learning rate every --decay-every epochs; cosine lowers it to 0.")
]
DecayEveryOption = Annotated[int, typer.Option(min=1, help="Epochs between two steps of the step schedule.")]
ClipOption = Annotated[
    float, typer.Option(min=0, metavar="NORM", help="Scale gradients down to this norm if they are longer; 0: never.")
]
BatchMeshesOption = Annotated[int | None, typer.Option(min=1, help="Meshes per step of all ranks, one each at least.")]
BatchVerticesOption = Annotated[
    int | None, typer.Option(min=1, help="Instead of a number of meshes: at most N vertices per step.")
]
AccumulateOption = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Divide each step into N passes, which need less memory, with equal results."
    ),
]
RotateOption = Annotated[
    bool | None,
    typer.Option("--rotate/--no-rotate", help="Rotate xyz, normals and vectors at random in training. Default: yes."),
]
RotateAboutOption = Annotated[
    RotationAxis, typer.Option(help="The axis of the random rotations; any for all rotations.")
]
ScaleRangeOption = Annotated[
    float, typer.Option(min=1, max=10, help="Scale meshes at random by a factor from 1/S to S in training.")
]
JitterOption = Annotated[
    float,
    typer.Option(min=0, max=0.99, help="Standard deviation of noise on xyz in training. Meshes have radius 1."),
]
MirrorOption = Annotated[bool, typer.Option("--mirror", help="Mirror half of the meshes in training.")]
CutOption = Annotated[
    float,
    typer.Option(
        min=0, max=0.99, help="Also train on cut variants of the meshes. Random planes cut off up to this share."
    ),
]
DecimateOption = Annotated[
    float,
    typer.Option(min=0, max=0.99, help="Also train on variants with fewer faces, which lack up to this share."),
]
VariantsOption = Annotated[int, typer.Option(min=1, help="Variants of each training mesh, with --cut or --decimate.")]
ValidationOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.9,
        help="Share of the training meshes held out to choose the best epoch, as a part val/ of the data does.",
    ),
]
GroupByOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Random divisions leave groups together, such as scans of a patient. A regular expression on the names of "
        "meshes: its first group, or all that it matches, names the group.",
    ),
]
EvalEveryOption = Annotated[int, typer.Option(min=1, help="Epochs between evaluations of the test set.")]
TrainKOption = Annotated[
    int, typer.Option("--k", min=0, help="Number of eigenpairs; 0 is allowed for implicit diffusion of xyz.")
]
PrecisionOption = Annotated[Precision, typer.Option(help="auto is bf16 on GPUs that support it, else fp32.")]
BackendOption = Annotated[
    TrainBackend, typer.Option(help="auto uses the fused kernels on a GPU; torch is plain PyTorch.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of weights, order of meshes, dropout and splits.")]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Also write last.pt after every N steps of an epoch, to resume there."),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Resume the run in --out with its options; --data is repeated.")
]
ResumeManyOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Keep the results of an earlier call, also of a stopped one, with the same network and options.",
    ),
]
CaptureOption = Annotated[bool, typer.Option(help="On a GPU, launch the kernels of a step together as a CUDA graph.")]
AverageWeightsOption = Annotated[
    float,
    typer.Option(min=0, max=0.999999, metavar="DECAY", help="Average the weights over about 1/(1 - DECAY) steps."),
]
MaxFacesOption = Annotated[
    int | None,
    typer.Option(
        min=4,
        help="Decimate meshes with more faces. Scores and predictions are those of the full meshes. Default: none.",
    ),
]

# Options of correspondence that several commands have.
PairsOption = Annotated[
    str | None,
    typer.Option(
        help="all pairs of meshes, those within or across folders, or a file with two names in each line. By default "
        "pairs.txt in the folder, else all."
    ),
]
BaseOption = Annotated[
    Base, typer.Option(help="Number of the first vertex in files of correspondences, 0 or 1; auto finds it.")
]
ZoomOutOption = Annotated[
    bool, typer.Option("--zoomout", help="Refine functional maps with ZoomOut, to all eigenpairs of the network.")
]
