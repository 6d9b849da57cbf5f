"""Classify whole shapes, as the original's second experiment does: spheres, capsules and tori in place of SHREC11."""

import torch
import trimesh

from diffnet import DiffusionNet, collate, hks, label_smoothing_loss, precompute


def main(meshes: int = 15, epochs: int = 10, k: int = 32) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [trimesh.creation.icosphere(3), trimesh.creation.capsule(height=4), trimesh.creation.torus(1, 0.4)]
    samples = []
    for label in torch.arange(meshes) % 3:
        verts = shapes[label].vertices * (1 + 0.3 * torch.rand(3).numpy())  # stretched at random
        operators = precompute(verts, shapes[label].faces, k=k, normalize=True)
        samples.append((hks(operators), operators, label))
    model = DiffusionNet(16, 3, width=32, outputs_at="global_mean", dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(samples[3:], batch_size=4, shuffle=True, collate_fn=collate)
    for _ in range(epochs):
        for x, operators, labels in loader:
            optimizer.zero_grad()
            logits = model(x.to(device), operators.to(device))
            label_smoothing_loss(logits, labels.to(device), smoothing=0.2).backward()
            optimizer.step()
    x, operators, labels = (each.to(device) for each in collate(samples[:3]))
    print(f"test accuracy {(model(x, operators).argmax(1) == labels).double().mean():.3f} of 3 shapes")


if __name__ == "__main__":
    main()
