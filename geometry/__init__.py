from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh import Mesh, MeshLike, load_mesh, make_mesh, mesh_edges

__all__ = ["Mesh", "MeshError", "MeshLike", "load_mesh", "make_mesh", "mesh_edges"]
