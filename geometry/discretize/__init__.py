"""From a mesh to its Laplacian, mass, tangent frames and gradient."""
