"""Learn correspondences without labels by deep functional maps (Donati et al. 2020, Roufosse et al. 2019)."""

import torch
import trimesh

from diffnet import DiffusionNet, collate, geodesic_label_errors, precompute, to_spectral, wks


def functional_map(a, b, evals_a, evals_b):
    """C (B, K, K) with C a ≈ b for coefficients a, b (B, K, F), regularized to commute with the Laplacians."""
    penalty = 1e-3 * (evals_b[:, :, None] - evals_a[:, None, :]) ** 2
    return torch.linalg.solve((a @ a.mT)[:, None] + torch.diag_embed(penalty), (b @ a.mT)[..., None])[..., 0]


def main(pairs: int = 3, steps: int = 20, k: int = 20) -> None:
    device, sphere = "cuda" if torch.cuda.is_available() else "cpu", trimesh.creation.icosphere(3)
    verts = torch.tensor(sphere.vertices).float() * torch.tensor([1.0, 0.8, 0.6])
    bumpy = verts * (1 + 0.3 * torch.sin(3 * verts.sum(1, keepdim=True)))
    shapes = [[(bumpy * (1 + 0.1 * torch.rand(3)), sphere.faces) for _ in range(pairs)] for _ in range(2)]
    left, right = (collate([precompute(*shape, k=k, normalize=True) for shape in side]).to(device) for side in shapes)
    model = DiffusionNet(16, 16, width=32, blocks=2, dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        a, b = (to_spectral(model(wks(side), side), side) for side in (left, right))
        there, back = functional_map(a, b, left.evals, right.evals), functional_map(b, a, right.evals, left.evals)
        optimizer.zero_grad()
        sum((c - torch.eye(k, device=device)).square().mean() for c in (there @ back, there.mT @ there)).backward()
        optimizer.step()
    matches = torch.cdist(right[0].evecs @ there[0], left[0].evecs).argmin(1)
    errors = geodesic_label_errors(shapes[0][0], matches, range(len(verts)))
    print(f"mean geodesic error {errors.mean():.3f} between {len(verts)} vertices")


if __name__ == "__main__":
    main()
