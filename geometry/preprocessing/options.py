"""The options of `precompute` that decide its result."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from diffnet.geometry.discretize.laplacian import LAPLACIANS, LaplacianKind
from diffnet.geometry.errors import OptionError

BasisPrecision: TypeAlias = Literal["float32", "float16", "bfloat16"]
BASIS_PRECISIONS: tuple[BasisPrecision, ...] = get_args(BasisPrecision)


@dataclass
class Options:
    """Checked options. Together with the mesh they decide the operators and the key of their cache entry.

    Raises OptionError for k < 0 and for an unknown Laplacian or precision, TypeError for a k that is not an integer.

    k: number of eigenpairs
    laplacian: see `laplacian_and_mass`
    basis: precision in which eigenvectors are stored
    """

    k: int
    laplacian: LaplacianKind = "robust"
    basis: BasisPrecision = "float32"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("laplacian", self.laplacian, LAPLACIANS),
            ("basis", self.basis, BASIS_PRECISIONS),
        ):
            if value not in known:
                raise OptionError(f"{name} should be one of {', '.join(known)}, got {value!r}")
        if self.k < 0:
            raise OptionError(f"k should be at least 0, got {self.k}")
        self.k = operator.index(self.k)
