from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh import Mesh, load_mesh

__all__ = ["Mesh", "MeshError", "load_mesh"]
