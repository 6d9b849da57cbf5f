"""The options of commands: those that several commands share, and those that `train/options/` declares."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from diffnet.data.labeled import PlaceAt
from diffnet.geometry.errors import OptionError, raised_as
from diffnet.geometry.mesh.mesh import FORMATS
from diffnet.options import declared, value_kind
from diffnet.pretrained import network_path
from diffnet.train.console import console
from diffnet.train.options.panels import of_run

if TYPE_CHECKING:
    from diffnet import DiffusionNet
    from diffnet.train.tasks.task import NetworkInput


def default_cache() -> Path:
    """The `diffnet` folder in the user's cache folder, or in the temporary folder if the user has no home."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(tempfile.gettempdir() if folder.startswith("~") else folder) / "diffnet"


MESH_FILES = f"{', '.join(suffix[1:] for suffix in FORMATS[:-1])} or {FORMATS[-1][1:]}, also with .gz"


@dataclass(frozen=True)
class RunOptions:
    """How a command works, which a run doesn't store. See `run_training`."""

    device: str = of_run("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N.")
    capture: bool = of_run(True, "On a GPU, launch the kernels of a step together as a CUDA graph.")
    cache: Path = of_run(default_cache(), "Folder that keeps preprocessed meshes between runs.")
    jobs: int | None = of_run(None, "Meshes to preprocess at once. By default, one per core.", least=1)
    memory: float = of_run(2.0, "Memory of the host for samples that don't fit on the GPU.", least=0.01, metavar="GIB")
    checkpoint_every: int | None = of_run(
        None, "Also write last.pt after every N steps of an epoch, to resume there.", least=1, metavar="N"
    )
    folds: int | None = of_run(
        None,
        "Train N times, and report the mean and the spread of the scores. Each run tests on another Nth of the meshes, "
        "which are divided at random; with --group-by, in groups.",
        least=2,
        metavar="N",
    )
    skip_unusable: bool = of_run(False, "Go on without meshes that can't be used. The report names them.")
    resume: bool = of_run(False, "Resume the run in --out with its options; --data is repeated.")


PATTERN = {"help": "The meshes of folders, by their paths there, such as 'sub-*/surf/lh.pial'. By default, all."}

_KINDS = {
    "original": "a checkpoint of the original implementation",
    "original correspondence": "a correspondence checkpoint of the original implementation",
    "unsupervised correspondence": "a checkpoint of unsupervised correspondence (Cao et al. 2023)",
}
NETWORKS = (
    "A network: the folder of a run, its best.pt or last.pt, a file of DiffusionNet.save or a folder of "
    "save_pretrained, a checkpoint of the original implementation, or the name of a built-in network."
)


def checkpoint_option(help: str = NETWORKS, **more: Any) -> Any:
    """The option of a network, whose value becomes the path of its file, see `network_path`."""
    return typer.Option(help=help, callback=lambda path: path and network_path(path), **more)


CheckpointOption = Annotated[Path, checkpoint_option()]
LabelsAtOption = Annotated[
    PlaceAt | None,
    typer.Option(help="Elements that a checkpoint of the original labels; it doesn't tell. By default, vertices."),
]

ConditionOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER",
        help="A condition of all meshes, for a network that was trained with --conditions; or a table with a column "
        "file and a column for each condition (.csv or .tsv). May be repeated. Others are in the field data of VTK "
        "files.",
    ),
]
MapFormatOption = Annotated[
    Literal["txt", "csv", "npy"] | None, typer.Option("--format", help="Form of the maps in a folder. Default: txt.")
]


def described_input(checkpoint: Path, network: DiffusionNet) -> NetworkInput:
    """The input of a network. For a checkpoint of another program, say what it is and what its network gets.

    Raises MetadataError, which names the file, see `network_input`.
    """
    from diffnet.train.fine_tuning import is_original
    from diffnet.train.inference.network_input import network_input
    from diffnet.train.tasks.task import MetadataError

    with raised_as(MetadataError, checkpoint, MetadataError):
        expected = network_input(network)
    if is_original(checkpoint):
        options = expected.options
        console.print(
            f"{checkpoint}: {_KINDS[network.metadata['kind']]}. It doesn't record its input, which is taken to be "
            f"{options.features} at {options.normalize} 1, with {options.k} eigenpairs and the original's operators.",
            soft_wrap=True,
        )
    return expected


def parameters(
    options: type,
    names: Iterable[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> list[inspect.Parameter]:
    """The parameters of a command for the fields of a dataclass that are declared with `option`.

    names: of these options; all by default
    defaults: other defaults than those of the dataclass
    changes: further entries by name, which replace those of the field. `default` is a default.
    common: further entries of all

    Each entry of `option` becomes a part of the option. The command line takes decimal numbers of two digits below
    `below`.
    """
    every = declared(options)
    values = {field.name: field.default for field in fields(options)} | dict(defaults or {})
    result = []
    for name in every if names is None else names:
        kind, metadata = every[name]
        entries = {"default": values[name], **metadata, **common, **(changes or {}).get(name, {})}
        if "help" in entries:
            result.append(_parameter(name, kind, **entries))
    return result


def options_of_many_files() -> list[inspect.Parameter]:
    """The parameters of commands that make a result for each of many files."""
    cache = {"default": None, "help": "Folder that keeps preprocessed meshes. By default, none is kept."}
    resume = {"help": "Keep the results of an earlier call, also of a stopped one, with the same network and options."}
    changes: dict[str, dict[str, Any]] = {"cache": cache, "resume": resume}
    return parameters(RunOptions, ("device", "cache", "resume", "jobs"), panel=None, changes=changes)


def _declared(own: inspect.Parameter) -> inspect.Parameter:
    """A parameter of a command, whose default may be an `option`."""
    if isinstance(own.default, Field):
        return _parameter(own.name, own.annotation, own.default.default, **own.default.metadata)
    return own.replace(kind=own.KEYWORD_ONLY)


def _parameter(name: str, kind: Any, default: Any, help: str, **entries: Any) -> inspect.Parameter:
    least, below, most = (entries[bound] for bound in ("least", "below", "most"))
    flag, check = entries.get("flag", f"--{name.replace('_', '-')}"), entries.get("check")
    if get_origin(kind) is tuple:
        kind, default = list[str], list(default)
    elif default is None and NoneType not in get_args(kind):
        kind = kind | None
    is_switch = value_kind(kind) is bool and default is not False
    info = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        help=help,
        min=least,
        max=below - 0.01 if most is None and below is not None else most,
        metavar=entries.get("metavar"),
        callback=None if check is None else lambda value: _checked(check, value),
        rich_help_panel=entries["panel"],
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default)


def _checked(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return None if value is None else check(value)
    except OptionError as e:
        raise typer.BadParameter(str(e)) from e


def with_parameters(*more: inspect.Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give more parameters to a command, which gets them and `context` as `**options`.

    Defaults of its own parameters may be declared with `option`.

    Errors begin with flags: "--lr should be above 0" instead of "learning_rate should be above 0". The messages of
    `TrainOptions` begin with the name of the option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def extended(**arguments: Any) -> Any:
            try:
                return command(**arguments)
            except OptionError as e:
                name, space, rest = str(e).partition(" ")
                flags = {option.name: option.opts[0] for option in arguments["context"].command.params}
                raise OptionError(flags.get(name, name) + space + rest) from e

        first = inspect.signature(command, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        every = [_declared(p) for p in first if p.kind is not p.VAR_KEYWORD and p.name != "context"] + [*more, context]
        extended.__doc__, extended.__name__ = command.__doc__, command.__name__
        extended.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        extended.__annotations__ = {p.name: p.annotation for p in every}
        return extended

    return decorate
