"""The options that all commands `diffnet train TASK` share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Annotated, Any, get_args

import typer

from diffnet.geometry.errors import OptionError
from diffnet.options import Architecture, declared
from diffnet.train.commands import options as o
from diffnet.train.options import TrainOptions


def _network_options() -> dict[str, Any]:
    """The options of a network, from their declaration. The command line takes decimal numbers of two digits."""
    options = {}
    for name, (kind, about) in declared(Architecture).items():
        largest = None if about["below"] is None else about["below"] - 0.01
        options[name] = Annotated[kind, typer.Option(min=about["least"], max=largest, help=about["help"])]
    return options


# Those of `TrainOptions`, by the panels of --help and in their order.
OF_TRAINING: dict[str, dict[str, Any]] = {
    "Features and operators": {
        "features": o.FeaturesOption,
        "k": o.TrainKOption,
        "laplacian": o.LaplacianOption,
        "basis": o.BasisOption,
        "join": o.JoinOption,
        "operators": o.OperatorsOption,
        "normalize": o.NormalizeOption,
        "max_faces": o.MaxFacesOption,
    },
    "Network": _network_options(),
    "Training": {
        "epochs": o.EpochsOption,
        "learning_rate": o.LearningRateOption,
        "schedule": o.ScheduleOption,
        "decay_every": o.DecayEveryOption,
        "clip": o.ClipOption,
        "batch_meshes": o.BatchMeshesOption,
        "batch_vertices": o.BatchVerticesOption,
        "accumulate": o.AccumulateOption,
        "average_weights": o.AverageWeightsOption,
        "validation": o.ValidationOption,
        "group_by": o.GroupByOption,
        "eval_every": o.EvalEveryOption,
        "seed": o.SeedOption,
    },
    "Augmentation": {
        "rotate": o.RotateOption,
        "rotate_about": o.RotateAboutOption,
        "scale_range": o.ScaleRangeOption,
        "jitter": o.JitterOption,
        "mirror": o.MirrorOption,
        "cut": o.CutOption,
        "decimate": o.DecimateOption,
        "variants": o.VariantsOption,
    },
    "Run": {
        "precision": o.PrecisionOption,
        "backend": o.BackendOption,
    },
}

# How a run is done, also in the panel "Run". These are not in `TrainOptions`.
OF_RUNS: dict[str, tuple[Any, Any]] = {
    "device": (o.DeviceOption, "auto"),
    "capture": (o.CaptureOption, True),
    "cache": (o.CacheOption, o.DEFAULT_CACHE),
    "jobs": (o.JobsOption, None),
    "memory": (o.MemoryOption, 2.0),
    "checkpoint_every": (o.CheckpointEveryOption, None),
    "resume": (o.ResumeOption, False),
}


def with_shared_options(
    command: Callable[..., Any], defaults: TrainOptions, without: Sequence[str] = ()
) -> Callable[..., Any]:
    """A command with the parameters of `command`, except `**options`, and then the shared options.

    A parameter of `command` with the name of a shared option replaces it.

    without: shared options to leave out

    `command` gets the shared options, `recipe` and `context` as `**options`. Its annotations must not be strings,
    because Typer reads them.
    """
    kinds = inspect.signature(command).parameters.values()
    own = {p.name: p for p in kinds if p.kind is not inspect.Parameter.VAR_KEYWORD}
    values = {**defaults.as_dict(), "laplacian": None}  # the one that belongs to the operators
    shared = [_parameter("context", typer.Context), _parameter("recipe", o.RecipeOption, "default")]
    for panel, options in OF_TRAINING.items():
        for name, kind in options.items():
            if name in own:
                replaced = own.pop(name)
                shared.append(_parameter(name, _in_panel(replaced.annotation, panel), replaced.default))
            elif name not in without:
                shared.append(_parameter(name, _in_panel(kind, panel), values[name]))
    shared += [_parameter(name, _in_panel(kind, "Run"), default) for name, (kind, default) in OF_RUNS.items()]

    def extended(**given: Any) -> Any:
        with flags_in_errors(given["context"]):
            return command(**given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values()] + shared
    extended.__doc__, extended.__name__ = command.__doc__, command.__name__
    extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    extended.__annotations__ = {p.name: p.annotation for p in parameters}
    return extended


def _in_panel(kind: Any, panel: str) -> Any:
    """A copy of an option, in a panel of --help. Commands with few options have no panels."""
    of, option = get_args(kind)
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[of, option]


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


@contextmanager
def flags_in_errors(context: typer.Context) -> Iterator[None]:
    """Make errors name flags: "--lr should be above 0" instead of "learning_rate should be above 0".

    Only the first word changes, and only if it is the name of an option of the command. The messages of `TrainOptions`
    begin with the name of the option.
    """
    try:
        yield
    except OptionError as e:
        name, space, rest = str(e).partition(" ")
        flags = {option.name: option.opts[0] for option in context.command.params}
        raise OptionError(flags.get(name, name) + space + rest) from e
