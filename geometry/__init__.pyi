from .descriptors import hks, wks
from .diagnosis import Diagnosis, diagnose
from .discretize.coincident import joined_vertices
from .discretize.frames import tangent_frames
from .discretize.gradient import gradient_values, one_ring
from .discretize.laplacian import laplacian_and_mass
from .eigen.solve import eigenbases, eigenbasis
from .mesh.errors import MeshError
from .mesh.mesh import FORMATS, Mesh, MeshLike, load_mesh, make_mesh, mesh_edges
from .mesh.normalize import normalize_positions
from .mesh.normals import NORMALS_RULES, NormalsRule
from .neighborhoods import with_k_ring, with_nearest
from .operators import Operators, collate
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
from .vertex_patches import Patches, patches

__all__ = [
    "BASIS_PRECISIONS",
    "FORMATS",
    "JOIN_RULES",
    "LAPLACIANS",
    "NORMALS_RULES",
    "BasisPrecision",
    "Diagnosis",
    "JoinRule",
    "LaplacianKind",
    "Mesh",
    "MeshError",
    "MeshLike",
    "NormalsRule",
    "Operators",
    "Patches",
    "collate",
    "diagnose",
    "eigenbases",
    "eigenbasis",
    "gradient_values",
    "hks",
    "joined_vertices",
    "laplacian_and_mass",
    "load_mesh",
    "make_mesh",
    "mesh_edges",
    "normalize_positions",
    "one_ring",
    "patches",
    "precompute",
    "precompute_all",
    "tangent_frames",
    "with_k_ring",
    "with_nearest",
    "wks",
]
