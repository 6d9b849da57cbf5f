"""Build operators from a Laplacian of your own, here the cotangent Laplacian in SciPy, and use them in a network."""

import numpy as np
import scipy.sparse
import torch
import trimesh

from diffnet import DiffusionNet, Operators, hks, precompute


def main(k: int = 16) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = trimesh.creation.torus(1, 0.4)
    i, j = mesh.faces[:, [1, 2, 0]].T.ravel(), mesh.faces[:, [2, 0, 1]].T.ravel()  # the edge opposite to each corner
    weights = 0.5 / np.tan(mesh.face_angles.T.ravel())
    adjacency = scipy.sparse.coo_matrix((weights, (i, j)), shape=(len(mesh.vertices),) * 2)
    adjacency = adjacency + adjacency.T
    laplacian = scipy.sparse.diags(np.asarray(adjacency.sum(1)).ravel()) - adjacency
    mass = np.bincount(mesh.faces.ravel(), weights=np.repeat(mesh.area_faces / 3, 3))
    operators = Operators.from_parts(mass=mass, laplacian=laplacian, verts=mesh.vertices, faces=mesh.faces, k=k)
    reference = precompute(mesh, k=k, laplacian="cotan")
    difference = (operators.evals - reference.evals).abs().max() / reference.evals.max()
    operators = operators.to(device)
    outputs = DiffusionNet(16, 4, outputs_at="faces").to(device)(hks(operators), operators)
    print(f"eigenvalues differ by {difference:.1e} of the largest; outputs at faces {tuple(outputs.shape)}")


if __name__ == "__main__":
    main()
