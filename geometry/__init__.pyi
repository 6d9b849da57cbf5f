from .augmentation.cuts import MeshPart, cut_by_plane
from .augmentation.decimate import decimate
from .augmentation.transforms import mirrored, rotated, scaled
from .batches.collate import collate
from .batches.functional import (
    diffuse,
    from_spectral,
    functional_map,
    functional_map_from_points,
    gradient,
    mesh_mean,
    point_map,
    soft_functional_map,
    to_spectral,
    zoomout,
)
from .curvatures import curvature, diffused_curvature
from .descriptors import hks, wks
from .diagnosis import Diagnosis, diagnose, is_inside_out
from .discretize.coincident import joined_vertices
from .discretize.connectivity import Connectivity
from .discretize.frames import tangent_frames
from .discretize.gradient import gradient_values, one_ring
from .discretize.laplacian import laplacian_and_mass
from .eigen.solve import eigenbases, eigenbasis
from .elements.elements import (
    ElementsAt,
    border_lengths,
    edges_of_faces,
    element_areas,
    element_points,
    element_weights,
)
from .elements.instances import Instances, label_instances
from .elements.polygons import file_edges, on_triangles
from .elements.smoothing import smooth_boundaries
from .errors import MeshError
from .geodesics.curve import area_under_curve, error_curve, mean_error
from .geodesics.errors import Prediction, geodesic_errors, geodesic_errors_of_all, geodesic_label_errors
from .mesh.attributes import Attributes, load_attributes
from .mesh.boundary import boundary_vertices
from .mesh.mesh import FORMATS, Mesh, MeshLike, load_mesh, make_mesh, mesh_edges
from .mesh.normalize import normalize_positions
from .mesh.normals import NORMALS_RULES, NormalsRule
from .neighborhoods import nearest_pattern, with_k_ring, with_nearest
from .operators import Operators, UnpackAt
from .options import (
    BASIS_PRECISIONS,
    JOIN_RULES,
    LAPLACIANS,
    BasisPrecision,
    JoinRule,
    LaplacianKind,
)
from .positions.closest import closest_points
from .positions.farthest import farthest_points
from .positions.rotation import random_rotation, random_rotations, rotate
from .positions.surface_points import SurfacePoints
from .preprocessing.many import precompute_all
from .preprocessing.one import precompute
from .preprocessing.packed import assemble
from .vertex_patches import Patches, patches

__all__ = [
    "BASIS_PRECISIONS",
    "FORMATS",
    "JOIN_RULES",
    "LAPLACIANS",
    "NORMALS_RULES",
    "Attributes",
    "BasisPrecision",
    "Connectivity",
    "Diagnosis",
    "ElementsAt",
    "Instances",
    "JoinRule",
    "LaplacianKind",
    "Mesh",
    "MeshError",
    "MeshLike",
    "MeshPart",
    "NormalsRule",
    "Operators",
    "Patches",
    "Prediction",
    "SurfacePoints",
    "UnpackAt",
    "area_under_curve",
    "assemble",
    "border_lengths",
    "boundary_vertices",
    "closest_points",
    "collate",
    "curvature",
    "cut_by_plane",
    "decimate",
    "diagnose",
    "diffuse",
    "diffused_curvature",
    "edges_of_faces",
    "eigenbases",
    "eigenbasis",
    "element_areas",
    "element_points",
    "element_weights",
    "error_curve",
    "farthest_points",
    "file_edges",
    "from_spectral",
    "functional_map",
    "functional_map_from_points",
    "geodesic_errors",
    "geodesic_errors_of_all",
    "geodesic_label_errors",
    "gradient",
    "gradient_values",
    "hks",
    "is_inside_out",
    "joined_vertices",
    "label_instances",
    "laplacian_and_mass",
    "load_attributes",
    "load_mesh",
    "make_mesh",
    "mean_error",
    "mesh_edges",
    "mesh_mean",
    "mirrored",
    "nearest_pattern",
    "normalize_positions",
    "on_triangles",
    "one_ring",
    "patches",
    "point_map",
    "precompute",
    "precompute_all",
    "random_rotation",
    "random_rotations",
    "rotate",
    "rotated",
    "scaled",
    "smooth_boundaries",
    "soft_functional_map",
    "tangent_frames",
    "to_spectral",
    "with_k_ring",
    "with_nearest",
    "wks",
    "zoomout",
]
