"""Classify shapes with the data, transforms, loader and pooling of PyTorch Geometric around a block of DiffusionNet."""

import torch
import torch_geometric.transforms as T
import trimesh
from torch_geometric.loader import DataLoader
from torch_geometric.nn import Sequential, global_mean_pool
from torch_geometric.utils import from_trimesh

from diffnet import DiffusionNetBlock
from diffnet.data.pyg import AddOperators


def main(epochs: int = 20, meshes: int = 12, k: int = 16) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [(trimesh.creation.torus(1, 0.2 + i / 40), trimesh.creation.capsule(1 + i / 10)) for i in range(meshes)]
    transform = T.Compose([T.NormalizeScale(), AddOperators(k=k)])
    data = [transform(from_trimesh(shape[i % 2]).update({"y": i % 2})) for i, shape in enumerate(shapes)]
    first, block = (torch.nn.Linear(3, 32), "pos -> x"), (DiffusionNetBlock(32), "x, operators -> x")
    last = [(global_mean_pool, "x, batch -> x"), (torch.nn.Linear(32, 2), "x -> x")]
    model = Sequential("pos, operators, batch", [first, block, *last]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in (batch.to(device) for _ in range(epochs) for batch in DataLoader(data, batch_size=4, shuffle=True)):
        logits = model(batch.pos, batch.operators, batch.batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch.y).backward()
        optimizer.step()
    print(f"accuracy {(logits.argmax(1) == batch.y).float().mean():.3f} in the last batch")


if __name__ == "__main__":
    main()
