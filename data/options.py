"""The options that decide the network's view of a mesh. The command line shows their values, so this loads fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from diffnet.geometry.errors import OptionError
from diffnet.geometry.preprocessing.options import (
    BASIS_PRECISIONS,
    JOIN_RULES,
    LAPLACIANS,
    BasisPrecision,
    JoinRule,
    LaplacianKind,
)

FeatureKind: TypeAlias = Literal["hks", "log-hks", "xyz", "wks"]
FEATURE_CHANNELS: dict[FeatureKind, int] = {"hks": 16, "log-hks": 16, "xyz": 3, "wks": 16}


@dataclass(frozen=True)
class Preprocessing:
    """The options that decide the network's view of a mesh. A checkpoint stores them.

    k: number of eigenpairs; 0 is allowed for xyz features only
    laplacian, basis, join: see `precompute`
    features: input features at the vertices, see `input_features`

    Raises OptionError for a value that is not allowed.

    >>> Preprocessing(k=64, features="wks").laplacian
    'robust'
    """

    k: int = 128
    laplacian: LaplacianKind = "robust"
    features: FeatureKind = "hks"
    basis: BasisPrecision = "float32"
    join: JoinRule = "auto"

    def __post_init__(self) -> None:
        for name, known in (
            ("laplacian", LAPLACIANS),
            ("features", get_args(FeatureKind)),
            ("basis", BASIS_PRECISIONS),
            ("join", JOIN_RULES),
        ):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} should be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if isinstance(self.k, bool) or not hasattr(self.k, "__index__"):
            raise OptionError(f"k should be an integer, got {self.k!r} of type {type(self.k).__name__}")
        fewest = 0 if self.features == "xyz" else 1  # descriptors are computed from eigenpairs
        if self.k < fewest:
            raise OptionError(f"k should be at least {fewest}, got {self.k}")
