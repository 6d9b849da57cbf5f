"""Concatenate positions, own normals and HKS. The same normals define the tangent planes of a point cloud."""

import torch
import trimesh

from diffnet import DiffusionNet, hks, normalize_positions, precompute
from diffnet.geometry import random_rotations, rotate


def main(points: int = 600, steps: int = 40, k: int = 32) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torus = trimesh.creation.torus(1, 0.4)
    verts, face = trimesh.sample.sample_surface(torus, points, seed=0)
    normals = torch.tensor(torus.face_normals[face]).float().to(device)
    operators = precompute(verts, normals=torus.face_normals[face], k=k, normalize=True).to(device)
    cosine = (operators.normals * normals).sum(1)
    labels = torch.tensor(verts[:, :2]).norm(dim=1).gt(1).long().to(device)  # the outer half
    verts = normalize_positions(torch.tensor(verts).float()).to(device)
    model = DiffusionNet(3 + 3 + 16, 2, width=32, blocks=2, dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        rotation = random_rotations(1).to(device)  # the same for positions and normals
        turned = [rotate(x, rotation, operators.ptr) for x in (verts, normals)]
        loss = torch.nn.functional.cross_entropy(model(torch.cat([*turned, hks(operators)], 1), operators), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"mean cosine to the own normals {cosine.mean():.3f}, training loss {loss:.3f}")


if __name__ == "__main__":
    main()
