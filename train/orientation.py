"""The orientation of training meshes, and what random rotations do to it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diffnet.data import LabeledMesh, feature_parts
from diffnet.geometry import Mesh
from diffnet.geometry.elements.elements import element_areas
from diffnet.geometry.positions.alignment import principal_axes, share_an_axis
from diffnet.train.options import TrainOptions
from diffnet.train.report.spread import spread_over

LOOKED_AT = 50


def mesh_axes(mesh: Mesh) -> Tensor:
    """The `principal_axes` (3, 3) of a mesh."""
    areas = element_areas(mesh, "vertices") if len(mesh.faces) else np.ones(len(mesh.verts))
    return principal_axes(torch.from_numpy(mesh.verts), torch.from_numpy(areas))


def rotations_of(options: TrainOptions) -> str:
    """What training rotates, for the summary of a set. Empty if it rotates nothing."""
    if not options.rotates:
        return ""
    names = " and ".join(part.name for part in feature_parts(options.features) if part.is_vector)
    if options.aligns:
        return f"{names} in the axes of each mesh, rotated at random by small angles"
    axis = "any axis" if options.rotate_about == "any" else f"the {options.rotate_about} axis"
    return (
        f"{names} rotated at random about {axis}, so that predictions don't depend on such rotations; --no-rotate "
        "leaves them as they are"
    )


def warn_of_rotations(items: Sequence[LabeledMesh], options: TrainOptions) -> None:
    """Warn if training rotates features, nobody chose this, and the training meshes stand alike.

    items: the training meshes. Up to LOOKED_AT of them are looked at.
    """
    if not options.rotates or options.aligns or options.rotate is not None or options.rotate_about != "any":
        return
    looked_at = spread_over(range(len(items)), LOOKED_AT)
    if share_an_axis(torch.stack([mesh_axes(items[i].mesh) for i in looked_at])):
        warnings.warn(
            "the training meshes stand alike, but random rotations keep the network from using this. If the meshes to "
            "predict stand alike, too, add --no-rotate. If they stand upright and face any direction, add "
            "--rotate-about with the axis that points up. --rotate keeps the rotations without this warning",
            stacklevel=3,
        )
