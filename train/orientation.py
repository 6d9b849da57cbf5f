"""The orientation of training meshes, what random rotations do to it, and meshes that have another one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from diffnet.data import LabeledMesh, feature_parts, own_arrays, vector_channels
from diffnet.data.feature_names import check_turned
from diffnet.data.folders.files import listing
from diffnet.data.stored import remembered
from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import element_areas
from diffnet.geometry.positions.alignment import is_common_orientation, principal_axes, share_an_axis, shared_direction
from diffnet.train.options import TrainOptions
from diffnet.train.report.spread import spread_over

LOOKED_AT = 50
SIGNED = 11  # shapes whose axes have the same sign; 2¹⁻¹¹ < 0.001 is the probability of random signs


def mesh_axes(mesh: Mesh) -> Tensor:
    """The `principal_axes` (3, 3) of a mesh."""
    areas = element_areas(mesh, "vertices") if len(mesh.faces) else np.ones(len(mesh.verts))
    return principal_axes(torch.from_numpy(mesh.verts), torch.from_numpy(areas))


def upright_axis(meshes: Iterable[Mesh]) -> tuple[float, ...]:
    """The mean of the first principal axes, three numbers, if the meshes stand and look the same way.

    Otherwise empty, see `is_common_orientation`.
    """
    axes = torch.stack([mesh_axes(mesh) for mesh in meshes])
    return tuple(axes[:, 0].mean(0).tolist()) if is_common_orientation(axes) else ()


def upright_axes(items: Sequence[LabeledMesh], options: TrainOptions) -> tuple[float, ...]:
    """The directions of the principal axes that the training meshes share, for `tilted_axis`.

    Four numbers for each of the three axes, see `upright` of `SharedOptions`. Empty if they share none, and if the
    features don't tell the orientation. items: the training meshes. Up to LOOKED_AT of them are looked at.
    """
    turns = options.rotates and options.rotate_about == "any"
    if turns or options.aligns or not vector_channels(options.features) or not len(items):
        return ()
    about = None if options.rotate_about == "any" else torch.eye(3).double()["xyz".index(options.rotate_about)]
    axes = torch.stack([mesh_axes(items[i].mesh) for i in spread_over(range(len(items)), LOOKED_AT)]).double()
    rows: list[float] = []
    for own in axes.unbind(1):
        direction = shared_direction(own, about)
        if direction is None:
            rows += [0.0] * 4
        else:
            rows += [*direction.tolist(), float(len(own) >= SIGNED and bool((own @ direction > 0).all()))]
    return tuple(rows) if any(rows) else ()


def tilted_axis(mesh: Mesh, upright: Sequence[float]) -> int | None:
    """The number, from 0, of the first principal axis that is more than 60° from that of the training meshes, or None.

    upright: the option of the network
    """
    rows = (*upright, 1.0) if len(upright) == 3 else upright
    axes = mesh_axes(mesh).double() if len(rows) else torch.zeros(0, 3)
    for i in range(len(rows) // 4):
        direction, is_signed = torch.tensor(rows[4 * i : 4 * i + 3], dtype=torch.float64), rows[4 * i + 3]
        cosine = float(axes[i] @ direction / direction.norm())  # NaN for an axis that the training meshes don't share
        if (cosine if is_signed else abs(cosine)) < 0.5:
            return i
    return None


def warn_of_tilted(axes: Mapping[str, int | None]) -> None:
    """Warn of meshes in another orientation than the training meshes. axes: `tilted_axis` by the name of the mesh"""
    for i, word in enumerate(("first", "second", "third")):
        tilted = [name for name, axis in axes.items() if axis == i]
        if tilted:
            warnings.warn(
                f"{listing(tilted)}: the {word} principal axis is more than 60° from that of the training meshes. The "
                "network expects their orientation, so its results are probably wrong. Turn the meshes, or train with "
                "--rotate or with features that don't depend on the orientation, such as wks",
                stacklevel=3,
            )


def warn_of_tilted_items(items: Sequence[LabeledMesh], options: TrainOptions, jobs: int | None) -> None:
    """`warn_of_tilted` for the meshes of a set. jobs: see `remembered`"""
    if options.upright:
        found = remembered(partial(_tilted, upright=options.upright), items, "tilted", options.upright, jobs=jobs)
        warn_of_tilted(dict(found))


def _tilted(item: LabeledMesh, upright: Sequence[float]) -> list[Any]:
    return [item.name, tilted_axis(item.mesh, upright)]


def check_own_arrays(items: Sequence[LabeledMesh], options: TrainOptions) -> None:
    """Raises OptionError for an own array that could be a vector where meshes are turned or mirrored: `check_turned`.

    Warns of own scalars of both signs where meshes are mirrored. items: the training meshes. The first one tells the
    numbers of channels, and up to LOOKED_AT of them the signs.
    """
    if not (options.rotates or options.aligns or options.mirror):
        return
    own = {part.array: part.name for part in feature_parts(options.features) if part.array is not None}
    if not own or not len(items):
        return

    def arrays(i: int) -> Mapping[str, NDArray[np.float64]]:
        return own_arrays(items[i].mesh, options.features, given=items[i].arrays)

    check_turned(options.features, {name: array.shape[1] for name, array in arrays(0).items()})
    scalars = [part.array for part in feature_parts(options.features) if part.array is not None and not part.is_vector]
    if not options.mirror or not scalars:
        return
    looked_at = [arrays(i) for i in spread_over(range(len(items)), LOOKED_AT)]
    signed = [
        name for name in scalars if min(x[name].min() for x in looked_at) < 0 < max(x[name].max() for x in looked_at)
    ]
    if signed:
        warnings.warn(
            f"--mirror leaves the values of {', '.join(own[name] for name in signed)} as they are, which have both "
            "signs. A number that changes its sign in a mirror image, such as a turn to the left, is wrong then: leave "
            "out --mirror or this feature. vector:NAME is mirrored",
            stacklevel=3,
        )


def say_what_is_rotated(items: Sequence[LabeledMesh], options: TrainOptions, console: Console) -> None:
    """Print which features are rotated in training. Warn if nobody chose this and the training meshes stand alike.

    items: the training meshes. Up to LOOKED_AT of them are looked at.
    """
    if not options.rotates:
        return
    names = " and ".join(part.name for part in feature_parts(options.features) if part.is_vector)
    if options.aligns:
        console.print(
            f"Training gives {names} in the axes of each mesh, and rotates them at random by small angles",
            soft_wrap=True,
        )
        return
    axis = "any axis" if options.rotate_about == "any" else f"the {options.rotate_about} axis"
    console.print(
        f"Training rotates {names} at random about {axis}, so that predictions don't depend on such rotations; "
        "--no-rotate leaves them as they are",
        soft_wrap=True,
    )
    chosen = options.rotate is not None or options.rotate_about != "any"
    if chosen:
        return
    looked_at = spread_over(range(len(items)), LOOKED_AT)
    if share_an_axis(torch.stack([mesh_axes(items[i].mesh) for i in looked_at])):
        warnings.warn(
            "the training meshes stand alike, but random rotations keep the network from using this. If the meshes to "
            "predict stand alike, too, add --no-rotate. If they stand upright and face any direction, add "
            "--rotate-about with the axis that points up. --rotate keeps the rotations without this warning",
            stacklevel=3,
        )
