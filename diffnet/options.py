"""The options of a network, each declared once. The command line reads them, so this module loads fast."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from types import NoneType
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from diffnet.geometry.errors import OptionError

A = TypeVar("A")
P = ParamSpec("P")
S = TypeVar("S")

DiffusionMode: TypeAlias = Literal["spectral", "implicit"]
InitialTimes: TypeAlias = Literal["zero", "spread"]
MLPNorm: TypeAlias = Literal["none", "layer", "rms"]


def about(
    help: str, *, least: float | None = None, below: float | None = None, most: float | None = None, **more: Any
) -> dict[str, Any]:
    """The metadata of the field of an option: its explanation, and the range of its values.

    most: the largest value. Beside `below`, only the command line refuses more.
    more: `check`, a function from a value that may raise OptionError to the one to keep, and what the command line
        needs besides, see `diffnet.train.commands.options`
    """
    return {"help": help, "least": least, "below": below, "most": most, **more}


def option(default: Any, help: str, *, panel: str | None = None, **more: Any) -> Any:
    """The field of an option of a command, in a panel of its help. more: see `about`"""
    return field(default=default, metadata=about(help, panel=panel, **more))


class Checked:
    """Base class of dataclasses with options.

    Raises OptionError for a value that is none of the choices or out of range, and TypeError for a count that is no
    integer.
    """

    def __post_init__(self) -> None:
        for name, (kind, metadata) in declared(type(self)).items():
            value = getattr(self, name)
            if value is None and NoneType in get_args(kind):
                continue
            kind = value_kind(kind)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise OptionError(f"{name} should be one of {', '.join(get_args(kind))}, got {value!r}")
            if metadata and kind in (int, float, bool):  # such numbers may be of NumPy
                value = _plain(name, value, kind, metadata)
            object.__setattr__(self, name, metadata["check"](value) if "check" in metadata else value)


def _plain(name: str, value: Any, kind: type, metadata: Mapping[str, Any]) -> Any:
    """The value as a number of Python."""
    if kind is int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise TypeError(f"{name} should be an integer, got {value!r} of type {type(value).__name__}")
    if kind is float and (isinstance(value, bool) or not hasattr(value, "__float__")):
        return value  # the module that uses it says what to write
    least, below, most = (metadata[bound] for bound in ("least", "below", "most"))
    if below is not None and not least <= value < below:
        raise OptionError(f"{name} should be at least {least} and below {below}, got {value}")
    if below is None and most is not None and not least <= value <= most:
        raise OptionError(f"{name} should be from {least} to {most:g}, got {value}")
    if least is not None and not least <= value < math.inf:
        number = "a finite number of " if kind is float else ""
        raise OptionError(f"{name} should be {number}at least {least}, got {value}")
    return kind(value)


def value_kind(kind: Any) -> Any:
    """The type of an option, without None."""
    kinds = get_args(kind)
    return next(each for each in kinds if each is not NoneType) if NoneType in kinds else kind


def declared(options: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """The type and the metadata of each option of a dataclass. A class that changes a default keeps the metadata."""
    metadata: dict[str, Mapping[str, Any]] = {}
    for cls in reversed(options.__mro__):
        metadata |= {f.name: f.metadata for f in vars(cls).get("__dataclass_fields__", {}).values() if f.metadata}
    hints = get_type_hints(options)
    return {f.name: (hints[f.name], metadata.get(f.name, {})) for f in fields(options)}


@dataclass(frozen=True, kw_only=True)
class Sizes(Checked):
    """The size of a network."""

    width: int = field(default=128, metadata=about("Channels inside the network.", least=1))
    blocks: int = field(default=4, metadata=about("DiffusionNet blocks.", least=1))


@dataclass(frozen=True, kw_only=True)
class BlockArchitecture(Checked):
    """The options of a block that `diffnet train` has, too."""

    diffusion: DiffusionMode = field(
        default="spectral", metadata=about("spectral uses the eigenbasis; implicit solves a linear system.")
    )
    initial_times: InitialTimes = field(
        default="zero", metadata=about("Diffusion times before training: zero, or spread from 1e-4 to 1.")
    )
    mlp_norm: MLPNorm = field(default="none", metadata=about("Normalization of the input of the blocks' MLPs."))
    attention_heads: int = field(
        default=0, metadata=about("Heads of attention over one-rings in each block, or 0.", least=0)
    )
    global_tokens: int = field(
        default=0,
        metadata=about(
            "Tokens in the middle block that carry information across a whole mesh, also between components that don't "
            "touch, or 0.",
            least=0,
        ),
    )
    dropout: float = field(default=0.5, metadata=about("Dropout inside the blocks' MLPs.", least=0, below=1))


@dataclass(frozen=True, kw_only=True)
class Architecture(BlockArchitecture, Sizes):
    """The options of a network that `diffnet train` has, too. A checkpoint stores them."""

    @property
    def network(self) -> dict[str, Any]:
        """These options, as arguments of `DiffusionNet`."""
        return {f.name: getattr(self, f.name) for f in fields(Architecture)}


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """Let `__init__`, which takes an object of a dataclass, be called with the fields of the dataclass.

    Its signature has the fields with their types and defaults, and its docstring explains them.
    """

    def decorate(init: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(init)
        def taking(self: S, /, *values: P.args, **options: P.kwargs) -> None:
            init(self, arguments(*values, **options))

        parameters = inspect.signature(arguments).parameters.values()
        instance = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taking.__signature__ = inspect.Signature([instance, *parameters])  # type: ignore[attr-defined]
        about = {f.name: f.metadata["help"] for f in fields(arguments)}  # type: ignore[arg-type]
        taking.__doc__ = "\n".join(f"{p.name}: {about[p.name]}" for p in parameters)
        arguments.__init__.__qualname__ = init.__qualname__  # type: ignore[misc]  # errors for wrong arguments name it
        return taking

    return decorate
