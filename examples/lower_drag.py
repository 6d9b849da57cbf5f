"""A surface is changed to lower a number that a network predicts, through operators that follow its vertices.

The number is Newton's drag: particles of a stream hit the surface. The angle of the stream is a condition.
"""

import torch
import trimesh

from diffnet import DiffusionNet
from diffnet.geometry import Connectivity, assemble

SPHERE = trimesh.creation.icosphere(1)
VERTS, FACES = torch.tensor(SPHERE.vertices, dtype=torch.float32), torch.tensor(SPHERE.faces)


def stretched(x: torch.Tensor) -> torch.Tensor:
    """Ellipsoids (B, V, 3) of one volume, for any numbers (B, 3). Their axes stay in the range of the training."""
    logs = 0.6 * x.tanh()
    return VERTS.to(x) * (logs - logs.mean(1, keepdim=True)).exp()[:, None]


def drag(verts: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The true numbers (B,): the integrals of 2 (−n · u)³ over the faces that look upstream, with the stream u."""
    areas = torch.linalg.cross(*verts[:, FACES.to(verts.device)].diff(dim=2).unbind(2)) / 2
    stream = torch.stack([angles.cos(), 0 * angles, angles.sin()], 1)
    hit = (-areas @ stream[:, :, None]).clamp_min(0)[..., 0]
    return (2 * hit**3 / areas.square().sum(2)).sum(1)


def predict(model: DiffusionNet, verts: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The numbers (B,) of the network, differentiable in the vertices (B, V, 3)."""
    (batch, count), x = verts.shape[:2], verts.flatten(0, 1)
    faces = (FACES + count * torch.arange(batch)[:, None, None]).flatten(0, 1).to(x.device)
    o = assemble(x, Connectivity(faces, len(x), [count] * batch))
    return model(torch.cat([x, o.normals], 1), o, angles[:, None])[:, 0] * o.mass.view(batch, count).sum(1)


def main(steps: int = 300, changes: int = 50) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"diffusion": "implicit", "outputs_at": "global_mean", "condition_channels": 1, "global_tokens": 4}
    model = DiffusionNet(6, 1, width=16, blocks=2, dropout=0.0, **options).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, steps)
    for _ in range(steps):
        verts, angles = stretched(torch.randn(8, 3, device=device)), torch.rand(8, device=device) - 0.5
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(predict(model, verts, angles), drag(verts, angles)).backward()
        optimizer.step()
        scheduler.step()
    x, angle = torch.zeros(1, 3, device=device, requires_grad=True), torch.full((1,), 0.3, device=device)
    optimizer, before = torch.optim.Adam([x], lr=0.05), drag(stretched(x), angle).item()
    for _ in range(changes):
        (x.grad,) = torch.autograd.grad(predict(model, stretched(x), angle), x)
        optimizer.step()
    predicted, after = predict(model, stretched(x), angle).item(), drag(stretched(x), angle).item()
    print(f"drag {before:.3f} of the sphere, {after:.3f} of the new surface, predicted {predicted:.3f}")


if __name__ == "__main__":
    main()
