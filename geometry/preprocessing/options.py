"""The options of `precompute` that decide its result. The command line shows them, so this module loads fast."""

from __future__ import annotations

import operator
import reprlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from diffnet.geometry.errors import OptionError

LaplacianKind: TypeAlias = Literal["robust", "cotan"]
BasisPrecision: TypeAlias = Literal["float32", "float16", "bfloat16"]
JoinRule: TypeAlias = Literal["auto", "always", "never"]
LAPLACIANS: tuple[LaplacianKind, ...] = get_args(LaplacianKind)
BASIS_PRECISIONS: tuple[BasisPrecision, ...] = get_args(BasisPrecision)
JOIN_RULES: tuple[JoinRule, ...] = get_args(JoinRule)


@dataclass
class Options:
    """Checked options. Together with the mesh they decide the operators and the key of their cache entry.

    Raises OptionError for a k that is not an integer or is negative, and for an unknown Laplacian, precision or
    rule.

    k: number of eigenpairs
    laplacian: see `laplacian_and_mass`
    basis: precision in which eigenvectors are stored
    join: see `joined_vertices`
    """

    k: int
    laplacian: LaplacianKind = "robust"
    basis: BasisPrecision = "float32"
    join: JoinRule = "auto"

    def __post_init__(self) -> None:
        self.k = _checked_k(self.k)
        for name, value, known in (
            ("laplacian", self.laplacian, LAPLACIANS),
            ("basis", self.basis, BASIS_PRECISIONS),
            ("join", self.join, JOIN_RULES),
        ):
            if not isinstance(value, str) or value not in known:
                raise OptionError(f"{name} should be one of {', '.join(known)}, got {_shown(value)}")


def _checked_k(k: Any) -> int:
    try:
        if isinstance(k, bool):
            raise TypeError
        number = operator.index(k)
    except TypeError as e:
        hint = ""
        if k is None or not isinstance(k, (str, bytes, int, float, complex)):
            hint = ". Pass vertices and faces as one tuple: precompute_all([(verts, faces), …])"
        raise OptionError(f"k should be an integer, got {_shown(k)}{hint}") from e
    if number < 0:
        raise OptionError(f"k should be at least 0, got {number}")
    return number


def _shown(value: Any) -> str:
    """A short text of any value, with the shape of an array."""
    shape = getattr(value, "shape", None)
    return reprlib.repr(value) if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
