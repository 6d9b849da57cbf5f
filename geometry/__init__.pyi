from .augmentation.cuts import MeshPart, cut_by_plane
from .augmentation.decimation import decimated
from .augmentation.transforms import mirrored, rotated, scaled
from .batches.collate import collate
from .batches.functional import diffuse, from_spectral, gradient, mesh_mean, to_spectral
from .batches.unpack import UnpackAt
from .descriptors import hks, wks
from .diagnosis import Diagnosis, diagnose
from .discretize.coincident import joined_vertices
from .discretize.frames import tangent_frames
from .discretize.gradient import gradient_values, one_ring
from .discretize.laplacian import laplacian_and_mass
from .eigen.solve import eigenbases, eigenbasis
from .geodesics import geodesic_label_errors
from .mesh.attributes import Attributes, load_attributes
from .mesh.boundary import boundary_vertices
from .mesh.errors import MeshError
from .mesh.mesh import FORMATS, Mesh, MeshLike, load_mesh, make_mesh, mesh_edges
from .mesh.normalize import normalize_positions
from .mesh.normals import NORMALS_RULES, NormalsRule
from .neighborhoods import with_k_ring, with_nearest
from .operators import Operators
from .positions.farthest import farthest_points
from .positions.rotation import random_rotation, random_rotations, rotate
from .preprocessing.many import precompute_all
from .preprocessing.one import precompute
from .preprocessing.options import (
    BASIS_PRECISIONS,
    JOIN_RULES,
    LAPLACIANS,
    BasisPrecision,
    JoinRule,
    LaplacianKind,
)
from .shape_operator import curvature
from .vertex_patches import Patches, patches

__all__ = [
    "BASIS_PRECISIONS",
    "FORMATS",
    "JOIN_RULES",
    "LAPLACIANS",
    "NORMALS_RULES",
    "Attributes",
    "BasisPrecision",
    "Diagnosis",
    "JoinRule",
    "LaplacianKind",
    "Mesh",
    "MeshError",
    "MeshLike",
    "MeshPart",
    "NormalsRule",
    "Operators",
    "Patches",
    "UnpackAt",
    "boundary_vertices",
    "collate",
    "curvature",
    "cut_by_plane",
    "decimated",
    "diagnose",
    "diffuse",
    "eigenbases",
    "eigenbasis",
    "farthest_points",
    "from_spectral",
    "geodesic_label_errors",
    "gradient",
    "gradient_values",
    "hks",
    "joined_vertices",
    "laplacian_and_mass",
    "load_attributes",
    "load_mesh",
    "make_mesh",
    "mesh_edges",
    "mesh_mean",
    "mirrored",
    "normalize_positions",
    "one_ring",
    "patches",
    "precompute",
    "precompute_all",
    "random_rotation",
    "random_rotations",
    "rotate",
    "rotated",
    "scaled",
    "tangent_frames",
    "to_spectral",
    "with_k_ring",
    "with_nearest",
    "wks",
]
