"""The options that decide the network's view of a mesh. The command line shows their values, so this loads fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from diffnet.data.feature_names import canonical_features, feature_parts
from diffnet.geometry.errors import OptionError
from diffnet.geometry.options import (
    SCALE_RULES,
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    Options,
    Scale,
    checked_k,
    chosen_scale,
)

Base: TypeAlias = Literal["auto", "0", "1"]  # the number of the first vertex in files of indices, see `load_pairs`


@dataclass(frozen=True)
class Preprocessing:
    """The options that decide the network's view of a mesh. A checkpoint stores them.

    k: number of eigenpairs; 0 is allowed for features without hks, log-hks and wks
    laplacian, basis, join, operators: see `precompute`
    normalize: "radius", "area", "none" or a length, how positions are normalized first; see `normalize_positions`. For
        the original's operators, "radius" and "area" become "all-radius" and "all-area".
    features: input features at the vertices, such as "hks" or "xyz+normals", see `input_features`. The parts are put in
        canonical order.

    Raises OptionError for a value that is not allowed.

    >>> Preprocessing(k=64, features="wks").laplacian
    'robust'
    """

    k: int = 128
    laplacian: LaplacianKind | None = None
    features: str = "hks"
    basis: BasisPrecision = "float32"
    join: JoinRule = "auto"
    operators: OperatorsKind = "diffnet"
    normalize: Scale = "radius"

    def __post_init__(self) -> None:
        # `object.__setattr__` is the only way to set a field of a frozen dataclass.
        object.__setattr__(self, "features", canonical_features(self.features))
        checked_k(self.k, 1 if any(part.needs_eigenpairs for part in feature_parts(self.features)) else 0)
        object.__setattr__(self, "laplacian", self.decisive.laplacian)  # `Options` checks these
        object.__setattr__(self, "normalize", chosen_scale(self.normalize, self.operators))
        if not isinstance(self.normalize, float) and self.normalize not in SCALE_RULES:
            raise OptionError(f"normalize should be one of {', '.join(SCALE_RULES)}, got {self.normalize!r}")

    @property
    def decisive(self) -> Options:
        """The options that decide the operators of a mesh at normalized positions."""
        return Options(self.k, self.laplacian, self.basis, self.join, self.operators)


@dataclass(frozen=True)
class Variants:
    """How variants of the training meshes are made, see `make_variants`.

    count: number of variants of each mesh, besides the mesh itself
    cut: the largest share of the surface that a plane cuts off, at least 0 and below 1. 0 cuts nothing.
    decimate: the largest share of the faces that decimation removes, at least 0 and below 1. 0 removes none.

    Raises OptionError for a value that is not allowed.
    """

    count: int = 0
    cut: float = 0.0
    decimate: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise OptionError(f"the number of variants should be at least 0, got {self.count}")
        for name in ("cut", "decimate"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name} should be at least 0 and below 1, got {getattr(self, name)}")
