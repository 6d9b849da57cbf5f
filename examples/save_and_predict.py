"""Save a network as a folder that others can load, load it, and predict labels of a file as `diffnet predict` does."""

import tempfile
from pathlib import Path

import torch
import trimesh

from diffnet import DiffusionNet, hks, precompute, viz
from diffnet.train import predict_labels


def main(folder: str | None = None, steps: int = 40, k: int = 32) -> None:
    device, out = "cuda" if torch.cuda.is_available() else "cpu", Path(folder or tempfile.mkdtemp())
    mesh = trimesh.creation.icosphere(3).apply_transform(torch.tensor([1.0, 1.0, 3.0, 1.0]).diag().numpy())
    mesh.export(out / "mesh.ply")
    labels = torch.tensor(abs(mesh.vertices[:, 2]) > 1.5).long().to(device)
    operators = precompute(mesh, k=k, normalize=True).to(device)
    model = DiffusionNet(16, 2, width=32, blocks=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(hks(operators), operators), labels).backward()
        optimizer.step()
    names, source = ["middle", "tip"], {"data": "one ellipsoid", "data_license": "CC0-1.0"}
    model.save_pretrained(out, features="hks", k=k, normalize=True, label_names=names, **source)
    loaded = DiffusionNet.from_pretrained(out, device=device)
    ((shape, predicted),) = predict_labels([out / "mesh.ply"], loaded, device)
    viz.write_ply(out / "labels.ply", shape, labels=predicted, label_names=loaded.metadata["label_names"])
    print(f"accuracy {(labels.cpu().numpy() == predicted).mean():.3f}, see {out / 'labels.ply'}")


if __name__ == "__main__":
    main()
