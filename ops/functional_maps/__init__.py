"""Functional maps between shapes, and maps of their points."""

from diffnet.ops.functional_maps.conversion import (
    functional_map_from_correspondences,
    functional_map_from_points,
    point_map,
)
from diffnet.ops.functional_maps.losses import bijectivity_loss, coupling_loss, orthogonality_loss
from diffnet.ops.functional_maps.nearest import nearest_neighbors
from diffnet.ops.functional_maps.op import Regularizer, functional_map
from diffnet.ops.functional_maps.soft_map import soft_map
from diffnet.ops.functional_maps.zoomout import zoomout

__all__ = [
    "Regularizer",
    "bijectivity_loss",
    "coupling_loss",
    "functional_map",
    "functional_map_from_correspondences",
    "functional_map_from_points",
    "nearest_neighbors",
    "orthogonality_loss",
    "point_map",
    "soft_map",
    "zoomout",
]
