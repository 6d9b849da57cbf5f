"""Use `DiffusionNetBlock` in a network of your own, which also gives each vertex the mean of its mesh."""

import torch

from diffnet import DiffusionNetBlock, collate, hks, mesh_mean, precompute
from diffnet.data import BODIES, load_dataset


class ContextNet(torch.nn.Module):
    def __init__(self, channels: int, classes: int, width: int = 32):
        super().__init__()
        self.first, self.last = torch.nn.Linear(channels, width), torch.nn.Linear(2 * width, classes)
        self.local, self.joint = DiffusionNetBlock(width, dropout=0.0), DiffusionNetBlock(2 * width, dropout=0.0)

    def forward(self, x, operators):
        x = self.local(self.first(x), operators)
        context = mesh_mean(x, operators).repeat_interleave(operators.ptr.diff(), dim=0)  # a row per vertex
        return self.last(self.joint(torch.cat([x, context], 1), operators))


def main(steps: int = 60, k: int = 32) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bodies = load_dataset(BODIES, labels_at="vertices").train[:2]
    samples = [(precompute(item.mesh, k=k, normalize=True), item.labels) for item in bodies]
    operators, labels = (x.to(device) for x in collate(samples))
    model = ContextNet(16, 8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(hks(operators), operators), labels).backward()
        optimizer.step()
    print(f"training accuracy {(model(hks(operators), operators).argmax(1) == labels).double().mean():.3f}")


if __name__ == "__main__":
    main()
