"""A sphere is fitted to the points of a box: its vertices move, and its operators follow them."""

import torch
import trimesh

from diffnet.geometry import Connectivity, assemble
from diffnet.ops import implicit_diffusion


def main(steps: int = 100) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    box, sphere = trimesh.creation.box((2, 1, 1)), trimesh.creation.icosphere(3)
    points = torch.from_numpy(trimesh.sample.sample_surface(box, 1000, seed=0)[0]).to(device)
    verts = torch.tensor(sphere.vertices, device=device, requires_grad=True)
    connectivity = Connectivity(torch.from_numpy(sphere.faces).to(device), len(verts))
    optimizer = torch.optim.Adam([verts], lr=0.02)
    time = verts.new_full((3,), 0.01)
    for _ in range(steps):
        o = assemble(verts, connectivity)
        fit = torch.cdist(points, verts).amin(1).square().mean()
        # Positions diffused along the surface are those of a smoother surface.
        smooth = implicit_diffusion(verts, time, o.laplacian, o.mass, o.ptr, o.lengths)
        bending = (o.mass[:, None] * (verts - smooth).square()).sum()
        optimizer.zero_grad()
        (fit + bending).backward()
        optimizer.step()
    print(f"distance of the points {fit.sqrt():.3f}, area {o.mass.sum():.2f}; the box has {box.area:.2f}")


if __name__ == "__main__":
    main()
