"""A mesh or a point cloud in, `Operators` out."""

from diffnet.geometry.descriptors import hks, normalize_positions, wks
from diffnet.geometry.diagnosis import Diagnosis, diagnose
from diffnet.geometry.eigenbasis import eigenbases, eigenbasis
from diffnet.geometry.errors import MeshError
from diffnet.geometry.frames import tangent_frames
from diffnet.geometry.gradient import gradient_values, one_ring
from diffnet.geometry.laplacian import LAPLACIANS, LaplacianKind, laplacian_and_mass
from diffnet.geometry.mesh import FORMATS, Mesh, MeshLike, load_mesh, make_mesh, mesh_edges
from diffnet.geometry.neighborhoods import with_k_ring, with_nearest
from diffnet.geometry.operators import Operators, collate
from diffnet.geometry.patches import Patches, patches
from diffnet.geometry.precompute import (
    BASIS_PRECISIONS,
    BasisPrecision,
    Unsolved,
    is_cached,
    precompute,
    unsolved_entry,
)

__all__ = [
    "BASIS_PRECISIONS",
    "FORMATS",
    "LAPLACIANS",
    "BasisPrecision",
    "Diagnosis",
    "LaplacianKind",
    "Mesh",
    "MeshError",
    "MeshLike",
    "Operators",
    "Patches",
    "Unsolved",
    "collate",
    "diagnose",
    "eigenbases",
    "eigenbasis",
    "gradient_values",
    "hks",
    "is_cached",
    "laplacian_and_mass",
    "load_mesh",
    "make_mesh",
    "mesh_edges",
    "normalize_positions",
    "one_ring",
    "patches",
    "precompute",
    "tangent_frames",
    "unsolved_entry",
    "with_k_ring",
    "with_nearest",
    "wks",
]
