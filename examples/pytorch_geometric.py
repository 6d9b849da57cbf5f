"""Classify shapes with data, loader, layers and pooling of PyTorch Geometric around a block of DiffusionNet."""

import torch
import torch_geometric.transforms as T
import trimesh
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphConv, global_mean_pool
from torch_geometric.utils import from_trimesh

from diffnet import DiffusionNetBlock
from diffnet.data.pyg import AddOperators


class Net(torch.nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, channels), torch.nn.Linear(channels, classes)
        self.block, self.conv = DiffusionNetBlock(channels), GraphConv(channels, channels)

    def forward(self, data):
        x = self.block(self.first(data.pos), data.operators)
        edge_index, edge_weight = data.operators.laplacian.to_edges()
        x = torch.relu(self.conv(x, edge_index, edge_weight))
        return self.last(global_mean_pool(x, data.batch))


def main(epochs: int = 10, meshes: int = 12, k: int = 16) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [(trimesh.creation.torus(1, 0.2 + i / 40), trimesh.creation.capsule(1 + i / 10)) for i in range(meshes)]
    transform = T.Compose([T.NormalizeScale(), AddOperators(k=k)])
    data = [transform(from_trimesh(shape[i % 2]).update({"y": i % 2})) for i, shape in enumerate(shapes)]
    model = Net(32, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in (batch.to(device) for _ in range(epochs) for batch in DataLoader(data, batch_size=4, shuffle=True)):
        logits = model(batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch.y).backward()
        optimizer.step()
    print(f"accuracy {(logits.argmax(1) == batch.y).float().mean():.3f} in the last batch")


if __name__ == "__main__":
    main()
