"""The elements of a mesh, vertices, edges and faces, as places on its surface."""
