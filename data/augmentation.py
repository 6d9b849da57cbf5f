"""Random changes of samples in training, consistent with their operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diffnet.data.feature_names import KINDS, check_turned, feature_parts, vector_channels
from diffnet.data.features import rotate_vectors
from diffnet.data.labeled import UNLABELED, TargetsAt
from diffnet.data.places import places_of
from diffnet.data.samples import Sample
from diffnet.geometry import Operators, mirrored, rotated, scaled, spread
from diffnet.geometry.descriptors import hks_times


def augmented(
    sample: Sample,
    features: str,
    *,
    jitter: Tensor | None = None,
    mirror: Tensor | None = None,
    rotations: Tensor | None = None,
    factors: Tensor | None = None,
    times: Tensor | None = None,
    mirrored_classes: Tensor | None = None,
    labels_at: TargetsAt = "vertices",
    vectors: int = 0,
    lengths: Sequence[int] = (),
) -> Sample:
    """A packed sample whose meshes are changed, with features and operators that fit each other.

    features: those of the sample, such as "xyz+normals"
    jitter: (V, 3), is added to the positions among the features, in units of the normalized mesh, whose radius is 1.
        The operators stay those of the unchanged surface.
    mirror: (B,) bool, the meshes to mirror at the plane x = 0. Positions, normals and own vectors are mirrored; see
        `mirrored` for the operators. Other features don't change.
    rotations: (B, 3, 3), see `random_rotations`. Positions, normals, own vectors and frames turn.
    factors: (B,) positive, by which positions are multiplied; see `scaled` for the operators. hks, log-hks and wks are
        computed again, because they depend on the size. Normals, curvature and own arrays stay, vectors included.
    mirrored_classes: (C,) int64, the class that each class becomes in a mirrored mesh, such as right for left, or
        UNLABELED. None leaves labels as they are.
    labels_at: the elements with the labels of the sample
    vectors: so many vectors are the first columns of its targets. They turn and are mirrored, too.
    lengths: the columns of those of them that are multiplied by the factors, too, three for each
    times: the times of hks, on the device; see `hks_times`. Given, they need not be moved to a GPU.

    Raises OptionError for an own array `file:NAME` that could be a vector, see `check_turned`, if it is the only one.

    The changes are made in this order. Tensors are on the device of the sample. Nothing is read back from a GPU.

    >>> from diffnet.data import BODIES, Preprocessing, load_dataset, make_sample
    >>> sample = make_sample(load_dataset(BODIES).train[0], Preprocessing(k=8, features="xyz"))
    >>> larger = augmented(sample, "xyz", factors=torch.tensor([2.0]))
    >>> torch.equal(larger.features, 2 * sample.features)
    True
    """
    x, labels, operators, channels = sample.features, sample.labels, sample.operators, vector_channels(features)
    unknown = [str(part.array) for part in feature_parts(features) if part.channels is None]
    if len(unknown) == 1 and not (mirror is None and rotations is None):
        others = sum(part.channels or 0 for part in feature_parts(features))
        check_turned(features, {unknown[0]: x.shape[1] - others})
    if jitter is not None:
        x = _jittered(x, features, jitter)
    if mirror is not None:
        if channels or vectors:
            flips = torch.eye(3, device=x.device, dtype=x.dtype).repeat(len(operators), 1, 1)
            flips[:, 0, 0] = 1 - 2 * mirror.to(x.dtype)
            x = rotate_vectors(x, channels, flips, operators.ptr)
            labels = turned_targets(labels, vectors, flips, operators, labels_at)
        operators = mirrored(operators, mirror)
        if mirrored_classes is not None:
            exchanged = torch.where(labels < 0, UNLABELED, mirrored_classes[labels.clamp(min=0)])
            labels = torch.where(_per_label(operators, mirror, labels_at, len(labels)), exchanged, labels)
    if rotations is not None:
        x = rotate_vectors(x, channels, rotations, operators.ptr)
        labels = turned_targets(labels, vectors, rotations, operators, labels_at)
        operators = rotated(operators, rotations)
    if factors is not None:
        if lengths:
            labels = labels.clone()
            for first in lengths[::3]:  # an index of a list would be copied to the GPU
                labels[:, first : first + 3] *= _per_label(operators, factors, labels_at, len(labels))[:, None]
        operators = scaled(operators, factors)
        x = _rescaled(x, features, operators, factors, times)
    return replace(sample, features=x, labels=labels, operators=operators)


def turned_targets(targets: Tensor, vectors: int, matrices: Tensor, operators: Operators, at: TargetsAt) -> Tensor:
    """The targets (N, C) with their first columns, so many vectors, times the matrix of their mesh, (B, 3, 3)."""
    if not vectors:
        return targets
    slices = [slice(3 * i, 3 * i + 3) for i in range(vectors)]
    return rotate_vectors(targets, slices, matrices.to(targets.dtype), _extents(operators, at))


def _extents(operators: Operators, at: TargetsAt) -> Tensor:
    """(B+1,), the extents of the elements of each mesh."""
    if isinstance(at, tuple):
        return torch.stack([_extents(operators, place) for place in places_of(at)]).sum(0)
    if at == "meshes":
        return torch.arange(len(operators) + 1, device=operators.device)
    return {"vertices": lambda o: o.ptr, "faces": lambda o: o.face_ptr, "edges": lambda o: o.edge_ptr}[at](operators)


def _per_label(operators: Operators, values: Tensor, at: TargetsAt, count: int) -> Tensor:
    """Repeat the values of each mesh (B,) for its labels, `count` in all. Nothing is read back from a GPU."""
    return torch.repeat_interleave(values, _extents(operators, at).diff(), output_size=count)


def _jittered(x: Tensor, features: str, jitter: Tensor) -> Tensor:
    """The positions are the first channels."""
    parts = feature_parts(features)
    if parts[0].name != "xyz":
        raise ValueError(f"jitter needs features with xyz, got {features!r}")
    unit = KINDS["xyz"].factor if len(parts) > 1 else 1.0
    return torch.cat([x[:, :3] + unit * jitter, x[:, 3:]], 1)


def _rescaled(x: Tensor, features: str, operators: Operators, factors: Tensor, times: Tensor | None) -> Tensor:
    """The features of scaled meshes, given their operators."""
    parts, columns, start = feature_parts(features), [], 0
    for part in parts:
        kind = KINDS.get(part.name)
        stop = x.shape[1] if part.channels is None else start + part.channels  # own arrays are the last ones
        values = x[:, start:stop]
        if part.name == "xyz":
            values = values * spread(factors, operators)[:, None]
        elif kind is not None and kind.descriptor is not None:
            times = hks_times(device=x.device) if times is None else times
            values = kind.descriptor(operators, times)
            if len(parts) > 1:
                values = (values - kind.shift) * kind.factor
        columns.append(values)
        start = stop
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]
