"""The options of `precompute` that decide its result. The command line shows them, so this module loads fast."""

from __future__ import annotations

import math
import operator
import reprlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from diffnet.geometry.errors import OptionError

LaplacianKind: TypeAlias = Literal["robust", "cotan"]
OperatorsKind: TypeAlias = Literal["diffnet", "original"]
BasisPrecision: TypeAlias = Literal["float32", "float16", "bfloat16"]
JoinRule: TypeAlias = Literal["auto", "always", "never"]
ScaleRule: TypeAlias = Literal["radius", "area", "all-radius", "all-area", "none"]
Scale: TypeAlias = ScaleRule | float  # a number is the length that becomes 1
LAPLACIANS: tuple[LaplacianKind, ...] = get_args(LaplacianKind)
OPERATORS: tuple[OperatorsKind, ...] = get_args(OperatorsKind)
BASIS_PRECISIONS: tuple[BasisPrecision, ...] = get_args(BasisPrecision)
JOIN_RULES: tuple[JoinRule, ...] = get_args(JoinRule)
MAX_EIGENPAIRS = 2**16  # small meshes get zeros for eigenpairs that they lack, so a typo would fill the memory
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
_OF_ALL: dict[Any, ScaleRule] = {True: "all-radius", "radius": "all-radius", "area": "all-area"}


@dataclass
class Options:
    """Checked options. Together with the mesh they decide the operators and the key of their cache entry.

    Raises OptionError for a k that is not an integer or is out of range, for an unknown Laplacian, precision, rule or
    kind of operators, and for the robust Laplacian in the original's operators.

    k: number of eigenpairs, at most MAX_EIGENPAIRS
    laplacian: see `laplacian_and_mass`; None becomes the one that belongs to the operators
    basis: precision in which eigenvectors are stored
    join: see `joined_vertices`
    operators: "diffnet" or "original", see `precompute`
    """

    k: int
    laplacian: LaplacianKind | None = None
    basis: BasisPrecision = "float32"
    join: JoinRule = "auto"
    operators: OperatorsKind = "diffnet"

    def __post_init__(self) -> None:
        self.k = checked_k(self.k)
        self.laplacian = chosen_laplacian(self.laplacian, self.operators)
        for name, value, values in (
            ("laplacian", self.laplacian, LAPLACIANS),
            ("basis", self.basis, BASIS_PRECISIONS),
            ("join", self.join, JOIN_RULES),
            ("operators", self.operators, OPERATORS),
        ):
            if not isinstance(value, str) or value not in values:
                raise OptionError(f"{name} should be one of {', '.join(values)}, got {_shown(value)}")


def chosen_laplacian(laplacian: LaplacianKind | None, operators: OperatorsKind) -> LaplacianKind:
    """The Laplacian that a user chose or, for None, the one that belongs to the operators.

    Raises OptionError for the robust Laplacian in the original's operators.
    """
    if operators == "original" and laplacian == "robust":
        raise OptionError(
            'the original\'s operators have the cotangent Laplacian; leave out laplacian, or use operators="diffnet"'
        )
    if laplacian is None:
        return "cotan" if operators == "original" else "robust"
    return laplacian


def chosen_scale(normalize: Any, operators: OperatorsKind) -> Any:
    """The value of `normalize` that a user chose. With the original's operators, all vertices count, as there."""
    counts_more = operators == "original" and isinstance(normalize, (bool, str))
    return _OF_ALL.get(normalize, normalize) if counts_more else normalize


def counts_all(rule: Scale) -> bool:
    """Whether vertices of no face count as others do: in the scale, in statistics, in predictions and in scores."""
    return str(rule).startswith("all-")


def scale_in_units(rule: ScaleRule, units: float) -> Scale:
    """The scale for a rule and for the length that becomes 1, by default 1.

    Raises OptionError if this is not positive, and for another length with a rule that decides the size itself.
    """
    if not 0 < units < math.inf:
        raise OptionError(f"units should be a positive number, got {units}")
    if units == 1:
        return rule
    if rule != "none":
        raise OptionError(f"units are for --normalize none, and it is {rule}")
    return float(units)


def checked_k(k: Any, least: int = 0) -> int:
    """A number of eigenpairs. Raises OptionError for anything but an integer from `least` to MAX_EIGENPAIRS."""
    try:
        if isinstance(k, bool):
            raise TypeError
        number = operator.index(k)
    except TypeError as e:
        hint = f" of type {type(k).__name__}"
        if k is None or not isinstance(k, (str, bytes, int, float, complex)):
            hint = ". Pass vertices and faces as one tuple: precompute_all([(verts, faces), …])"
        raise OptionError(f"k should be an integer, got {_shown(k)}{hint}") from e
    if number < least:
        raise OptionError(f"k should be at least {least}, got {number}")
    if number > MAX_EIGENPAIRS:
        raise OptionError(f"k should be at most {MAX_EIGENPAIRS}, got {_shown(number)}")
    return number


def _shown(value: Any) -> str:
    """A short text of any value, with the shape of an array."""
    shape = getattr(value, "shape", None)
    return reprlib.repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
