"""Load meshes of different sizes by a data set of your own, in worker processes, in batches limited by vertices."""

import torch

from diffnet import DiffusionNet, collate, hks, precompute
from diffnet.data import BODIES, MeshBatches, load_dataset


class Bodies(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.items = load_dataset(BODIES, labels_at="vertices").train[:count]  # or the paths of your meshes

    def __getitem__(self, i):
        operators = precompute(self.items[i].mesh, k=32, normalize=True, cache_dir="cache")
        return {"x": hks(operators), "operators": operators, "labels": self.items[i].labels}


def main(meshes: int = 5, max_vertices: int = 2000, workers: int = 2) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = Bodies(meshes)
    batches = MeshBatches([len(item.labels) for item in data.items], max_vertices=max_vertices, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=workers)
    model, sizes = DiffusionNet(16, 8, width=32, blocks=2).to(device), []
    for batch in loader:
        logits = model(batch["x"].to(device), batch["operators"].to(device))
        torch.nn.functional.cross_entropy(logits, batch["labels"].to(device)).backward()
        sizes.append(batch["operators"].lengths)
    print(f"{len(sizes)} batches of meshes with these numbers of vertices: {sizes}")


if __name__ == "__main__":
    main()
