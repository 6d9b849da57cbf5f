from .augmentation.reduction import MeshPart as MeshPart, cut_by_plane as cut_by_plane, decimate as decimate
from .augmentation.transforms import mirrored as mirrored, rotated as rotated, scaled as scaled
from .batches.collate import PerMesh as PerMesh, Rows as Rows, collate as collate
from .batches.functional import (
    diffuse as diffuse,
    divergence as divergence,
    from_padded as from_padded,
    from_spectral as from_spectral,
    functional_map as functional_map,
    functional_map_from_points as functional_map_from_points,
    gradient as gradient,
    mesh_mean as mesh_mean,
    point_map as point_map,
    soft_functional_map as soft_functional_map,
    spread as spread,
    to_padded as to_padded,
    to_spectral as to_spectral,
    zoomout as zoomout,
)
from .descriptors import curvature as curvature, diffused_curvature as diffused_curvature, hks as hks, wks as wks
from .diagnosis import Diagnosis as Diagnosis, diagnose as diagnose, is_inside_out as is_inside_out
from .discretize.coincident import joined_vertices as joined_vertices
from .discretize.connectivity import Connectivity as Connectivity, boundary_vertices as boundary_vertices
from .discretize.frames import tangent_frames as tangent_frames
from .discretize.gradient import gradient_values as gradient_values, one_ring as one_ring
from .discretize.laplacian import laplacian_and_mass as laplacian_and_mass
from .eigen.solve import eigenbases as eigenbases, eigenbasis as eigenbasis
from .elements.elements import (
    ElementsAt as ElementsAt,
    border_lengths as border_lengths,
    edges_of_faces as edges_of_faces,
    element_areas as element_areas,
    element_points as element_points,
    element_weights as element_weights,
    file_edges as file_edges,
    on_triangles as on_triangles,
)
from .elements.labels import (
    Instances as Instances,
    label_instances as label_instances,
    smooth_boundaries as smooth_boundaries,
)
from .errors import MeshError as MeshError
from .geodesics.errors import (
    Prediction as Prediction,
    area_under_curve as area_under_curve,
    error_curve as error_curve,
    geodesic_errors as geodesic_errors,
    geodesic_errors_of_all as geodesic_errors_of_all,
    geodesic_label_errors as geodesic_label_errors,
    mean_error as mean_error,
)
from .mesh.attributes import load_attributes as load_attributes
from .mesh.formats import Attributes as Attributes
from .mesh.mesh import (
    FORMATS as FORMATS,
    Mesh as Mesh,
    MeshLike as MeshLike,
    load_mesh as load_mesh,
    make_mesh as make_mesh,
    mesh_edges as mesh_edges,
)
from .mesh.normalize import normalize_positions as normalize_positions
from .mesh.objects import NORMALS_RULES as NORMALS_RULES, NormalsRule as NormalsRule
from .neighborhoods import (
    Patches as Patches,
    nearest_pattern as nearest_pattern,
    patches as patches,
    with_k_ring as with_k_ring,
    with_nearest as with_nearest,
)
from .operators import Operators as Operators, UnpackAt as UnpackAt
from .options import (
    BASIS_PRECISIONS as BASIS_PRECISIONS,
    JOIN_RULES as JOIN_RULES,
    LAPLACIANS as LAPLACIANS,
    BasisPrecision as BasisPrecision,
    JoinRule as JoinRule,
    LaplacianKind as LaplacianKind,
)
from .positions.closest import closest_points as closest_points
from .positions.farthest import farthest_points as farthest_points
from .positions.rotation import (
    random_rotation as random_rotation,
    random_rotations as random_rotations,
    rotate as rotate,
)
from .positions.surface_points import SurfacePoints as SurfacePoints
from .preprocessing.many import precompute_all as precompute_all
from .preprocessing.one import precompute as precompute
from .preprocessing.packed import assemble as assemble
