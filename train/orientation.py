"""The orientation of training meshes, what random rotations do to it, and meshes that have another one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.data import LabeledMesh, feature_parts, own_arrays, vector_channels
from diffnet.data.feature_names import check_turned
from diffnet.data.folders.files import listing
from diffnet.data.stored import remembered, some_of
from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import element_areas
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions

LOOKED_AT = 50


def mesh_axes(mesh: Mesh) -> Tensor:
    """The axes (3, 3) of largest, second and least variance of a mesh, one in each row, a right-handed system.

    They turn with the mesh: with p_i the coordinates around its center, the first axis has E[p_1 |p|²] ≥ 0 and the
    third one E[p_3³] ≥ 0. If two variances are about equal, small changes of the mesh may exchange their axes. If one
    of the expectations is about 0, they may turn the axes by 180°.
    """
    areas = element_areas(mesh, "vertices")
    mass = torch.from_numpy(areas if areas.any() else np.ones(len(mesh.verts)))
    verts = torch.from_numpy(mesh.verts)
    offsets = verts - mass @ verts / mass.sum()
    _, axes = torch.linalg.eigh(offsets.mT @ (mass[:, None] * offsets))
    first, _, third = axes.mT.flip(0)
    first = first * (-1 if mass @ ((offsets @ first) * offsets.square().sum(1)) < 0 else 1)
    third = third * (-1 if mass @ (offsets @ third) ** 3 < 0 else 1)
    return torch.stack([first, torch.linalg.cross(third, first), third])


def shared_axes(axes: Tensor, about: Tensor | None = None) -> Tensor:
    """The mean of each principal axis over meshes, where it has about the same direction in all of them: (3, 3).

    axes: the `mesh_axes` (N, 3, 3) of each mesh
    about: an axis (3,) of length 1, about which the meshes are turned at random

    The mean of (a · d)² over the axes a must be at least 0.8 for a direction d, and at least 1/3 + 1.35/√N. One set of
    random orientations in 1,000 reaches the latter (by simulation). Otherwise, the row is zeros. Signs of symmetric
    shapes, such as jaws, are random. If they differ, or the mean is shorter than 0.8 or √(8/N), the row is d / 2.
    """
    means, count = torch.zeros_like(axes[0]), len(axes)
    for row, each in zip(means, axes.unbind(1), strict=True):
        moments, mean = each.mT @ each / count, each.mean(0)
        if about is not None:
            along, outer = about @ moments @ about, torch.outer(about, about)
            moments, mean = along * outer + (1 - along) / 2 * (torch.eye(3).to(outer) - outer), outer @ mean
        values, directions = torch.linalg.eigh(moments)
        if values[-1] >= max(0.8, 1 / 3 + 1.35 / count**0.5):
            has_sign = mean.norm() >= max(0.8, (8 / count) ** 0.5) and bool((each @ mean > 0).all())
            row[:] = mean if has_sign else directions[:, -1] / 2
    return means


def rotations_of(options: TrainOptions) -> str:
    """What training rotates, for the summary of a set. Empty if it rotates nothing."""
    if not options.rotates:
        return ""
    names = " and ".join(part.name for part in feature_parts(options.features) if part.is_vector)
    axis = "any axis" if options.rotate_about == "any" else f"the {options.rotate_about} axis"
    return (
        f"{names} rotated at random about {axis}, so that predictions don't depend on such rotations; --no-rotate "
        "leaves them as they are"
    )


def upright_axes(items: Sequence[LabeledMesh], options: TrainOptions) -> tuple[float, ...]:
    """The `shared_axes` of training meshes, nine numbers. Empty if the network doesn't get their orientation.

    Up to LOOKED_AT of the meshes are looked at.
    """
    turns = options.rotates and options.rotate_about == "any"
    if turns or not vector_channels(options.features) or not len(items):
        return ()
    about = None if options.rotate_about == "any" else torch.eye(3)["xyz".index(options.rotate_about)].double()
    axes = shared_axes(_axes_of_some(items), about)
    return tuple(axes.flatten().tolist()) if axes.any() else ()


def _axes_of_some(items: Sequence[LabeledMesh]) -> Tensor:
    return torch.tensor(remembered(_axes_of, some_of(items, LOOKED_AT), "principal axes", jobs=1), dtype=torch.float64)


def _axes_of(item: LabeledMesh) -> Any:
    return mesh_axes(item.mesh).tolist()


def is_tilted(mesh: Mesh, upright: Sequence[float]) -> bool:
    """Whether a principal axis is more than 60° from that of the training meshes. upright: see `SharedOptions`"""
    if not upright:
        return False
    rows = torch.tensor(upright, dtype=torch.float64).view(-1, 3)
    lengths = rows.norm(dim=1)
    cosines = (mesh_axes(mesh)[: len(rows)] * rows).sum(1) / lengths  # NaN for axes that the meshes don't share
    return bool((torch.where(lengths > 0.7, cosines, cosines.abs()) < 0.5).any())


def warn_of_tilted(names: Sequence[str]) -> None:
    """Warn of meshes in another orientation than the training meshes, if there are any."""
    if names:
        warnings.warn(
            f"{listing(names)}: a principal axis is more than 60° from that of the training meshes. The network "
            "expects their orientation, so its results are probably wrong. Turn the meshes, or train with --rotate or "
            "with features that don't depend on the orientation, such as wks",
            stacklevel=3,
        )


def warn_of_tilted_items(items: Sequence[LabeledMesh], options: TrainOptions, jobs: int | None) -> None:
    """`warn_of_tilted` for the meshes of a set. jobs: see `remembered`"""
    if options.upright:
        tilts = remembered(partial(_tilted, upright=options.upright), items, "tilted", options.upright, jobs=jobs)
        warn_of_tilted([name for name, is_tilted in tilts if is_tilted])


def _tilted(item: LabeledMesh, upright: Sequence[float]) -> list[Any]:
    return [item.name, is_tilted(item.mesh, upright)]


def check_not_aligned(align: Any, features: str) -> None:
    """Raises OptionError for a network of an earlier version that gets vectors in the principal axes of each mesh."""
    if align and vector_channels(features):
        raise OptionError(
            f"align is true, so the network gets the vectors in {features} in the principal axes of each mesh. diffnet "
            "1.0.0 of 2026-11-26 was the last version that computes them; use it, or train again"
        )


def check_own_arrays(items: Sequence[LabeledMesh], options: TrainOptions) -> None:
    """Raises OptionError for an own array that could be a vector where meshes are turned or mirrored: `check_turned`.

    Warns of own scalars of both signs where meshes are mirrored. items: the training meshes, of which up to LOOKED_AT
    are looked at.
    """
    scalars = [part for part in feature_parts(options.features) if part.array is not None and not part.is_vector]
    if not scalars or not len(items) or not (options.rotates or options.mirror):
        return
    some = some_of(items, LOOKED_AT if options.mirror else 1)
    arrays = [own_arrays(item.mesh, options.features, given=item.arrays) for item in some]
    check_turned(options.features, {name: array.shape[1] for name, array in arrays[0].items()})
    values = {part.name: np.concatenate([each[str(part.array)].ravel() for each in arrays]) for part in scalars}
    names = [name for name, numbers in values.items() if numbers.min() < 0 < numbers.max()]
    if options.mirror and names:
        warnings.warn(
            f"--mirror leaves the values of {', '.join(names)} as they are, which have both signs. A number that "
            "changes its sign in a mirror image, such as a turn to the left, is wrong then: leave out --mirror or this "
            "feature. vector:NAME is mirrored",
            stacklevel=3,
        )


def warn_of_rotations(items: Sequence[LabeledMesh], options: TrainOptions) -> None:
    """Warn if training rotates features, nobody chose this, and the training meshes stand alike.

    items: the training meshes. Up to LOOKED_AT of them are looked at.
    """
    if not options.rotates or options.rotate is not None or options.rotate_about != "any":
        return
    if shared_axes(_axes_of_some(items)).any():
        warnings.warn(
            "the training meshes stand alike, but random rotations keep the network from using this. If the meshes to "
            "predict stand alike, too, add --no-rotate. If they stand upright and face any direction, add "
            "--rotate-about with the axis that points up. --rotate keeps the rotations without this warning",
            stacklevel=3,
        )
