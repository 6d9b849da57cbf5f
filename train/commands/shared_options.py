"""The options that all commands `diffnet train TASK` share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer

from diffnet.train.commands import options as o
from diffnet.train.commands.flags import flags_in_errors
from diffnet.train.options import TrainOptions

# Those of `TrainOptions`, in the order of --help.
OF_TRAINING: dict[str, Any] = {
    "features": o.FeaturesOption,
    "epochs": o.EpochsOption,
    "width": o.WidthOption,
    "blocks": o.BlocksOption,
    "diffusion": o.DiffusionOption,
    "initial_times": o.InitialTimesOption,
    "mlp_norm": o.MLPNormOption,
    "attention_heads": o.AttentionHeadsOption,
    "dropout": o.DropoutOption,
    "learning_rate": o.LearningRateOption,
    "schedule": o.ScheduleOption,
    "decay_every": o.DecayEveryOption,
    "clip": o.ClipOption,
    "batch_meshes": o.BatchMeshesOption,
    "batch_vertices": o.BatchVerticesOption,
    "rotate": o.RotateOption,
    "rotate_about": o.RotateAboutOption,
    "scale_range": o.ScaleRangeOption,
    "jitter": o.JitterOption,
    "mirror": o.MirrorOption,
    "cut": o.CutOption,
    "decimate": o.DecimateOption,
    "variants": o.VariantsOption,
    "average_weights": o.AverageWeightsOption,
    "validation": o.ValidationOption,
    "eval_every": o.EvalEveryOption,
    "k": o.TrainKOption,
    "laplacian": o.LaplacianOption,
    "basis": o.BasisOption,
    "join": o.JoinOption,
    "operators": o.OperatorsOption,
    "normalize": o.NormalizeOption,
    "max_faces": o.MaxFacesOption,
    "precision": o.PrecisionOption,
    "backend": o.BackendOption,
    "seed": o.SeedOption,
}

# How a run is done. These are not in `TrainOptions`.
OF_RUNS: dict[str, tuple[Any, Any]] = {
    "device": (o.DeviceOption, "auto"),
    "cache": (o.CacheOption, o.DEFAULT_CACHE),
    "jobs": (o.JobsOption, None),
    "resume": (o.ResumeOption, False),
    "capture": (o.CaptureOption, True),
}


def with_shared_options(
    command: Callable[..., Any], defaults: TrainOptions, without: Sequence[str] = ()
) -> Callable[..., Any]:
    """A command with the parameters of `command`, except `**options`, and then the shared options.

    without: shared options to leave out

    `command` gets the shared options, `recipe` and `context` as `**options`. Its annotations must not be strings,
    because Typer reads them.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [_parameter("context", typer.Context), _parameter("recipe", o.RecipeOption, "default")]
    values = {**defaults.as_dict(), "laplacian": None}  # the one that belongs to the operators
    shared += [_parameter(name, kind, values[name]) for name, kind in OF_TRAINING.items() if name not in without]
    shared += [_parameter(name, kind, default) for name, (kind, default) in OF_RUNS.items()]

    def extended(**given: Any) -> Any:
        with flags_in_errors(given["context"]):
            return command(**given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    extended.__doc__, extended.__name__ = command.__doc__, command.__name__
    extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    extended.__annotations__ = {p.name: p.annotation for p in parameters}
    return extended


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
