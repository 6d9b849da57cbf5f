"""Text that names input features, such as "xyz+normals", or targets. The command line checks it, so it loads fast."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeGuard

from diffnet import geometry  # loads its functions, and PyTorch, at first use
from diffnet.geometry.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

    from diffnet.geometry import Mesh, Operators

OFFSET_TIMES = 0.003, 0.01, 0.03, 0.1


@dataclass(frozen=True)
class Kind:
    """A kind of input features. Its values come from one of two functions.

    channels: the number C of its channels
    of_mesh: (mesh at normalized positions, operators) to values (V, C). Except for positions, metric-curvature and
        diffused-offsets, they don't depend on the size of the mesh.
    descriptor: (operators, times of `hks` or None) to values (V, C). They are computed again for a scaled mesh.
    needs_eigenpairs: whether `of_mesh` needs eigenpairs. Every descriptor does.
    shift, factor: the part beside others is (values − shift) · factor, of about −1 to 1. The constants give bodies
        about mean 0 and standard deviation 1, over all channels of the part.
    is_vector: whether the channels are a vector in space, which turns with the mesh. It is not shifted.
    """

    channels: int
    of_mesh: Callable[[Mesh, Operators], Tensor] | None = None
    descriptor: Callable[[Operators, Tensor | None], Tensor] | None = None
    shift: float = 0.0
    factor: float = 1.0
    is_vector: bool = False
    needs_eigenpairs: bool = False

    def values(self, mesh: Mesh, operators: Operators) -> Tensor:
        """The values of a single part, (V, C)."""
        if self.of_mesh is not None:
            return self.of_mesh(mesh, operators)
        assert self.descriptor is not None
        return self.descriptor(operators, None)


def _positions(mesh: Mesh, operators: Operators) -> Tensor:
    import torch

    return torch.from_numpy(mesh.verts).float()


def _diffused_curvature(mesh: Mesh, operators: Operators) -> Tensor:
    import torch

    curvatures = geometry.diffused_curvature(torch.from_numpy(mesh.verts), operators)
    return _without_unit(curvatures, mesh).flatten(1)


def _without_unit(curvatures: Tensor, mesh: Mesh) -> Tensor:
    """Mean and Gaussian curvature (…, 2) times the radius of the mesh and its square, compressed."""
    import torch

    verts = torch.from_numpy(mesh.verts)
    return _compressed(curvatures, float((verts - verts.mean(0)).norm(dim=1).max()))


def _compressed(curvatures: Tensor, length: float) -> Tensor:
    """Mean and Gaussian curvature (…, 2) times a length and its square, compressed."""
    import torch

    mean, gaussian = curvatures.unbind(-1)
    return torch.asinh(length * torch.stack([mean, gaussian.sign() * gaussian.abs().sqrt()], -1)) / 2


def _metric_curvature(mesh: Mesh, operators: Operators) -> Tensor:
    """Curvature and diffused curvature in the unit of the positions, so a part of a mesh has those of the whole."""
    import torch

    times = torch.tensor([0.001, 0.003, 0.01, 0.03]) / operators.mass.sum()
    diffused = geometry.diffused_curvature(torch.from_numpy(mesh.verts), operators, times=times)
    return _compressed(torch.cat([geometry.curvature(operators)[:, None], diffused], 1), 1.0).flatten(1)


def _diffused_offsets(mesh: Mesh, operators: Operators) -> Tensor:
    """What the normal and the offsets of a vertex to where diffusion takes it have in any frame.

    The offsets are those after four fixed times t, divided by √(2 t). The values are the dot products of each two of
    the five vectors, the lengths of the offsets, and of each three vectors the determinant d as sign(d) √|d|. A mirror
    image changes the signs of determinants, so these tell left from right.
    """
    import torch

    positions = torch.from_numpy(mesh.verts).to(operators.mass)
    centered = positions - (operators.mass[:, None] * positions).sum(0) / operators.mass.sum()
    spectrum, evecs = geometry.to_spectral(centered, operators)[0], operators.evecs.to(operators.mass)
    vectors = [operators.normals]
    for time in OFFSET_TIMES:
        diffused = evecs @ (torch.exp(-time * operators.evals[0])[:, None] * spectrum)
        vectors.append((diffused - centered) / math.sqrt(2 * time))
    values = [(a * b).sum(1) for a, b in combinations(vectors, 2)] + [a.norm(dim=1) for a in vectors[1:]]
    for a, b, c in combinations(vectors, 3):
        determinant = (torch.linalg.cross(a, b) * c).sum(1)
        values.append(determinant.sign() * determinant.abs().sqrt())
    return torch.stack(values, 1)


def log_hks(operators: Operators, times: Tensor | None) -> Tensor:
    return geometry.hks(operators, scales=times).clamp(min=1e-6).log() / 3


# In canonical order. Vectors come first, so their channels don't depend on the other parts.
KINDS: dict[str, Kind] = {
    "xyz": Kind(3, _positions, factor=3.0, is_vector=True),
    "normals": Kind(3, lambda mesh, operators: operators.normals, factor=math.sqrt(3), is_vector=True),
    "curvature": Kind(2, lambda mesh, operators: _without_unit(geometry.curvature(operators), mesh)),
    "diffused-curvature": Kind(8, _diffused_curvature, shift=0.2, factor=1.35, needs_eigenpairs=True),
    "metric-curvature": Kind(10, _metric_curvature, shift=0.2, factor=1.35, needs_eigenpairs=True),
    "diffused-offsets": Kind(24, _diffused_offsets, shift=0.1, factor=4.0, needs_eigenpairs=True),
    "hks": Kind(16, descriptor=lambda operators, times: geometry.hks(operators, scales=times), shift=3.0, factor=1 / 3),
    "log-hks": Kind(16, descriptor=log_hks, shift=0.2, factor=3.0),
    "wks": Kind(16, descriptor=lambda operators, times: geometry.wks(operators), shift=0.5, factor=2.0),
    "wks-128": Kind(128, descriptor=lambda o, times: geometry.wks(o, 128, unit=True), shift=0.91, factor=1.3),
}
FEATURE_CHANNELS: dict[str, int] = {name: kind.channels for name, kind in KINDS.items()}
FILE_PREFIX, VECTOR_PREFIX, SCALAR_PREFIX, MASK_PREFIX = "file:", "vector:", "scalar:", "mask:"  # of own arrays
COLORS = "colors"  # the name of an own array whose channels are known to be scalars
AUTO_LABELS = "auto"
LABEL_SOURCES = AUTO_LABELS, "groups", "materials", COLORS  # besides file:NAME
TARGET_TABLE = "targets.csv"  # the name of a table of targets in a folder
_OWN_NAME = re.compile(rf"({FILE_PREFIX}|{VECTOR_PREFIX}|{SCALAR_PREFIX}|{MASK_PREFIX})\w([\w. -]*\w)?")
DISPLACEMENT_PREFIX = "displacement:"  # of a vector in the unit of length of its mesh
TABLE_PREFIX = "table:"  # of a column of a table, beside targets in files


class ArrayStatistics(TypedDict):
    """Mean and standard deviation of each channel of an own array, over all training vertices. Lists of C floats.

    A vector keeps its direction: its mean counts as 0, and its three channels have the same standard deviation.
    """

    mean: list[float]
    std: list[float]


Statistics: TypeAlias = Mapping[str, ArrayStatistics]  # by the name of the array


@dataclass(frozen=True)
class FeaturePart:
    """One part of the input features.

    name: a key of KINDS, or for an array of the user's own "file:NAME", "vector:NAME", "scalar:NAME" or "mask:NAME"
    """

    name: str

    @property
    def array(self) -> str | None:
        """NAME of an own array, None for other parts."""
        return None if self.name in KINDS else self.name.partition(":")[2]

    @property
    def channels(self) -> int | None:
        """The number of channels. None for an own array that is no vector. It is known when the first mesh is read."""
        return 3 if self.is_vector else 1 if self.is_mask else FEATURE_CHANNELS.get(self.name)

    @property
    def is_mask(self) -> bool:
        """Whether it tells which vertices count. The other own arrays are 0 at those that don't."""
        return self.name.startswith(MASK_PREFIX)

    @property
    def is_vector(self) -> bool:
        """Whether the channels are a vector in space, which turns with the mesh."""
        return self.name.startswith(VECTOR_PREFIX) or (self.name in KINDS and KINDS[self.name].is_vector)

    @property
    def needs_eigenpairs(self) -> bool:
        kind = KINDS.get(self.name)
        return kind is not None and (kind.descriptor is not None or kind.needs_eigenpairs)


def feature_parts(features: str) -> tuple[FeaturePart, ...]:
    """The parts of features such as "hks" or "xyz+normals+file:quality", in canonical order.

    Vectors come first. Otherwise it is the order of KINDS, then that of the names of own arrays.

    Raises OptionError for an unknown or repeated part, for several masks, and for another type.

    >>> [part.name for part in feature_parts("file:quality+normals+xyz")]
    ['xyz', 'normals', 'file:quality']
    >>> [part.name for part in feature_parts("hks+vector:wind+xyz")]
    ['xyz', 'vector:wind', 'hks']
    """
    if not isinstance(features, str):
        raise OptionError(f"features should be text such as 'xyz+normals', got {type(features).__name__}")
    names = [name.strip() for name in features.split("+")]
    for name in names:
        if not _OWN_NAME.fullmatch(name) and name not in FEATURE_CHANNELS:
            raise OptionError(
                f"features should be one or several of {', '.join(FEATURE_CHANNELS)}, vector:NAME, scalar:NAME, "
                f"file:NAME and mask:NAME, joined by +, got {name[:60]!r}"
                + (f" in {features[:200]!r}" if len(names) > 1 else "")
            )
    parts = [FeaturePart(name) for name in names]
    arrays = [part.array or part.name for part in parts]
    for i, name in enumerate(arrays):
        if name in arrays[:i]:
            raise OptionError(f"features should have each part once, got {name!r} twice in {features[:200]!r}")
    masks = [part.name for part in parts if part.is_mask]
    if len(masks) > 1:
        raise OptionError(f"features should have one mask, got {' and '.join(masks)}")
    order = list(FEATURE_CHANNELS)
    place = {name: i for i, name in enumerate([*order, *sorted(set(names) - set(order))])}
    return tuple(sorted(parts, key=lambda part: (not part.is_vector, place[part.name])))


def canonical_features(features: str) -> str:
    """The text of features with its parts in canonical order. Raises OptionError, see `feature_parts`.

    >>> canonical_features("normals + xyz")
    'xyz+normals'
    """
    return "+".join(part.name for part in feature_parts(features))


def vector_channels(features: str) -> list[slice]:
    """The channels that are vectors in space, three for each. A rotation of the mesh turns these and no others.

    Raises OptionError, see `feature_parts`.

    >>> vector_channels("hks+xyz+normals")
    [slice(0, 3, None), slice(3, 6, None)]
    """
    return [slice(3 * i, 3 * i + 3) for i, part in enumerate(feature_parts(features)) if part.is_vector]


def array_names(features: str) -> list[str]:
    """The names NAME of the own arrays in the features. Raises OptionError, see `feature_parts`.

    >>> array_names("xyz+file:quality")
    ['quality']
    """
    return [part.array for part in feature_parts(features) if part.array is not None]


def mask_of(features: str) -> str | None:
    """The name NAME of the mask `mask:NAME` in the features, or None. Raises OptionError, see `feature_parts`.

    >>> mask_of("xyz+mask:cortex")
    'cortex'
    """
    return next((part.array for part in feature_parts(features) if part.is_mask), None)


def checked_mask(text: str) -> str:
    """The feature `mask:NAME` of file:NAME or of a file of FreeSurfer. Raises OptionError for other text.

    >>> checked_mask("file:cortex"), checked_mask("label/lh.cortex.label")
    ('mask:cortex', 'mask:cortex')
    """
    match = re.fullmatch(rf"(?:{FILE_PREFIX}|{MASK_PREFIX})(.+)|(?:.*/)?[lr]h\.(.+)\.label", text.strip())
    if match is None:
        raise OptionError(f"mask should be file:NAME or a file such as label/lh.cortex.label, got {text!r:.80}")
    return canonical_features(f"{MASK_PREFIX}{match[1] or match[2]}")


def with_mask(features: str, mask: str | None) -> str:
    """Features with a mask of `checked_mask`, which may be among them. Raises OptionError for another one there."""
    return features if mask is None or mask in features.split("+") else canonical_features(f"{features}+{mask}")


def feature_channels(features: str, statistics: Statistics | None = None) -> int:
    """The number of input channels of a network.

    statistics: of the own arrays, which tell their numbers of channels; see `array_statistics`

    Raises OptionError for an own array without statistics, and see `feature_parts`.

    >>> feature_channels("xyz+normals+hks")
    22
    """
    total = 0
    for part in feature_parts(features):
        channels = part.channels
        if channels is None:
            if part.array not in (statistics or {}):
                raise OptionError(f"the number of channels of {part.name} is not known: its statistics are missing")
            channels = len((statistics or {})[str(part.array)]["mean"])
        total += channels
    return total


def target_parts(targets: str) -> list[str]:
    """The names of targets such as "file:u+file:v", in the order of the text.

    Vectors come first, and columns of a table last, with their prefix. Raises OptionError for text of another form.

    >>> target_parts("table:drag + file:v + vector:w + file:u")
    ['vector:w', 'v', 'u', 'table:drag']
    """
    parts = [part.strip() for part in targets.split("+")] if isinstance(targets, str) else [""]
    plain = [part.replace(DISPLACEMENT_PREFIX, VECTOR_PREFIX, 1) for part in parts if not part.startswith(TABLE_PREFIX)]
    names = {part.partition(":")[2] for part in parts}
    is_name = all(_OWN_NAME.fullmatch(part) and not part.startswith((SCALAR_PREFIX, MASK_PREFIX)) for part in plain)
    if not is_name or len(names) < len(parts) or "" in names:
        kinds = f"file:NAME, {VECTOR_PREFIX}NAME, {DISPLACEMENT_PREFIX}NAME or {TABLE_PREFIX}COLUMN"
        raise OptionError(f"targets should be {kinds}, one or several joined by +, each once, got {targets!r:.99}")
    order = {FILE_PREFIX: 1, TABLE_PREFIX: 2}
    parts.sort(key=lambda part: order.get(part[: part.index(":") + 1], 0))
    return [part.removeprefix(FILE_PREFIX) for part in parts]


def vector_targets(targets: str | None) -> list[str]:
    """The names of the vectors among targets, with their prefix. They are the first columns, three for each.

    >>> vector_targets("file:p+displacement:u")
    ['displacement:u']
    """
    parts = target_parts(targets) if targets and is_in_files(targets) else []
    return [part for part in parts if ":" in part and not part.startswith(TABLE_PREFIX)]


def component_names(name: str) -> list[str]:
    """The names of the columns of an array of three columns."""
    return [f"{name}_{i}" for i in range(3)]


def checked_label_source(text: str) -> str:
    """One of LABEL_SOURCES, file:NAME, or the name of a column. Raises OptionError for other text."""
    text = text.strip()
    is_file = text.startswith(FILE_PREFIX) and _OWN_NAME.fullmatch(text)
    if is_file or (not is_in_files(text) and len(column_names("labels", text)) == 1):
        return text
    sources = ", ".join(LABEL_SOURCES)
    raise OptionError(f"labels should be {sources}, file:NAME or one column of a table, got {text!r:.80}")


def checked_targets(text: str) -> str:
    """Text of `target_parts` or of `column_names`. Raises OptionError for other text."""
    if is_in_files(text):
        target_parts(text)
        return text
    return ",".join(column_names("targets", text))


def column_names(option: str, text: str | None) -> list[str]:
    """The names of columns of a table in a text such as "speed,yaw", in their order. None has none.

    Raises OptionError, which begins with the option, for a missing name and for one that is there twice.

    >>> column_names("conditions", "speed, yaw")
    ['speed', 'yaw']
    """
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise OptionError(f"{option} should be different names separated by commas, got {text!r:.200}")
    return names


def is_in_files(text: str) -> bool:
    """Whether labels or targets are in files for each mesh, as "file:u+file:v", and not the columns of a table."""
    return ":" in text


def vector_columns(names: Sequence[str]) -> list[list[str]]:
    """The columns of targets whose names look like those of a vector in space, in threes.

    Their names are alike but for the end, which is x, y, z, or 0, 1, 2, or 1, 2, 3.

    >>> vector_columns(["Ux", "Uy", "Uz", "stress_0", "stress_1", "p"])
    [['Ux', 'Uy', 'Uz']]
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        end = re.search(r"([xyz]|\d+)$", name.lower())
        if end is not None:
            groups.setdefault(name[: end.start()].lower(), {})[end[1]] = name
    return [list(each.values()) for each in groups.values() if set(each) in ({*"xyz"}, {*"012"}, {*"123"})]


def check_target_statistics(statistics: Any, columns: int | None, name: str = "the targets") -> ArrayStatistics:
    """Statistics of targets as read from a file, checked. Raises OptionError for anything else.

    columns: the number of columns of the targets, or None if it isn't known
    name: of what they are, for the message
    """
    mean, std = (statistics.get(key) if isinstance(statistics, dict) else None for key in ("mean", "std"))
    if not (_are_numbers(mean) and _are_numbers(std) and len(mean) == len(std) and min(std) > 0):
        raise OptionError(
            f"the statistics of {name} should be two lists of finite numbers, mean and std, with std above 0"
        )
    if columns is not None and len(mean) != columns:
        raise OptionError(f"the statistics of {name} should be those of {columns} columns, and there are {len(mean)}")
    return {"mean": mean, "std": std}


def check_statistics(features: str, statistics: Any) -> Statistics:
    """Statistics as read from a file, checked: those of the own arrays in the features, and of no others.

    Raises OptionError for anything else.
    """
    names = array_names(features)
    if not isinstance(statistics, dict) or set(statistics) != set(names):
        raise OptionError(f"the statistics should be those of the own arrays {names}, and they are of others")
    for part in feature_parts(features):
        if part.array is not None:
            check_target_statistics(statistics[part.array], part.channels, part.name)
    return statistics


def check_turned(features: str, channels: Mapping[str, int]) -> None:
    """Raises OptionError for an own array of which it isn't known whether it turns with a mesh.

    Those are `file:NAME` with three channels, unless they are colors. channels: of own arrays, by NAME
    """
    for part in feature_parts(features):
        if part.name.startswith(FILE_PREFIX) and part.array != COLORS and channels.get(str(part.array)) == 3:
            raise OptionError(
                f"{part.name} has three columns, and meshes are turned or mirrored. If it is a vector in space, which "
                f"turns with the mesh, it is {VECTOR_PREFIX}{part.array}. If it is three numbers that stay as they "
                f"are, it is {SCALAR_PREFIX}{part.array}"
            )


def _are_numbers(values: Any) -> TypeGuard[list[float]]:
    """Whether this is a list of numbers that single precision holds, and not empty."""
    return isinstance(values, list) and bool(values) and all(type(x) is float and abs(x) < 1e38 for x in values)
