from .descriptors import hks, wks
from .diagnosis import Diagnosis, diagnose
from .eigensolver import eigenbases, eigenbasis
from .entries import BASIS_PRECISIONS, BasisPrecision, is_cached
from .errors import MeshError
from .frames import tangent_frames
from .gradient import gradient_values, one_ring
from .laplacian import LAPLACIANS, LaplacianKind, laplacian_and_mass
from .mesh import FORMATS, Mesh, MeshLike, load_mesh, make_mesh, mesh_edges
from .mesh_operators import precompute
from .neighborhoods import with_k_ring, with_nearest
from .operators import Operators, collate
from .positions import normalize_positions
from .vertex_patches import Patches, patches

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
    "with_k_ring",
    "with_nearest",
    "wks",
]
