"""Load meshes of different sizes by a data set of your own, in worker processes, in batches limited by vertices."""

import torch

from diffnet import DiffusionNet, collate, hks, precompute
from diffnet.data import BODIES, MeshBatches, load_dataset


class Bodies(torch.utils.data.Dataset):
    def __init__(self, part: str):
        self.items = getattr(load_dataset(BODIES, labels_at="vertices"), part)  # or the paths of your meshes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        operators = precompute(self.items[i].mesh, k=32, normalize=True, cache_dir="cache")
        return {"x": hks(operators), "operators": operators, "labels": self.items[i].labels}


def main(epochs: int = 20, max_vertices: int = 4000, workers: int = 2) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, right, count = Bodies("train"), 0, 0
    batches = MeshBatches([len(item.labels) for item in data.items], max_vertices=max_vertices, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=workers)
    model = DiffusionNet(16, 8, width=32, blocks=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for batch in (batch for _ in range(epochs) for batch in loader):
        logits = model(batch["x"].to(device), batch["operators"].to(device))
        torch.nn.functional.cross_entropy(logits, batch["labels"].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for batch in torch.utils.data.DataLoader(Bodies("test"), collate_fn=collate):
        predicted = model(batch["x"].to(device), batch["operators"].to(device)).argmax(1).cpu()
        right, count = right + int((predicted == batch["labels"]).sum()), count + len(predicted)
    print(f"test accuracy {right / count:.3f} after {epochs} epochs of {len(batches)} batches")


if __name__ == "__main__":
    main()
