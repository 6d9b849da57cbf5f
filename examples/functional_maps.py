"""Learn correspondences without labels by deep functional maps (Roufosse et al. 2019, Cao et al. 2023)."""

import torch
import trimesh

import diffnet
from diffnet.ops import bijectivity_loss, coupling_loss, orthogonality_loss


def main(pairs: int = 3, steps: int = 20, k: int = 20) -> None:
    device, sphere = "cuda" if torch.cuda.is_available() else "cpu", trimesh.creation.icosphere(3)
    verts = torch.tensor(sphere.vertices).float() * torch.tensor([1.0, 0.8, 0.6])
    bumpy = verts * (1 + 0.3 * torch.sin(3 * verts.sum(1, keepdim=True)))
    shapes = [[(bumpy * (1 + 0.1 * torch.rand(3)), sphere.faces) for _ in range(pairs)] for _ in range(2)]
    a, b = (diffnet.collate([diffnet.precompute(*s, k=k, normalize=True) for s in side]).to(device) for side in shapes)
    model = diffnet.DiffusionNet(16, 16, width=32, blocks=2, dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x, y = (torch.nn.functional.normalize(model(diffnet.wks(side), side), dim=1) for side in (a, b))
        there, back = diffnet.functional_map(x, y, a, b), diffnet.functional_map(y, x, b, a)
        loss = bijectivity_loss(there, back) + orthogonality_loss(there) + orthogonality_loss(back)
        loss = loss + coupling_loss(there, diffnet.soft_functional_map(x, y, a, b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    matches = b.unpack(diffnet.point_map(there, a, b))[0]  # a vertex of the first shape of a for each of b
    errors = diffnet.geodesic_label_errors(shapes[0][0], matches, range(len(verts)))
    print(f"mean geodesic error {errors.mean():.3f} between {len(verts)} vertices")


if __name__ == "__main__":
    main()
