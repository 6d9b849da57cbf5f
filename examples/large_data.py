"""Train on a set that may be larger than the memory: labels and operators are in a few large files, the shards."""

import tempfile
from pathlib import Path

import torch

from diffnet import DiffusionNet
from diffnet.data import (
    BODIES,
    MeshBatches,
    MeshSamples,
    Preprocessing,
    collate_samples,
    index_dataset,
    load_shards,
    write_shards,
)


def main(epochs: int = 20, k: int = 32, max_vertices: int = 4000, workers: int = 2) -> None:
    right, count = 0, 0
    device, folder = "cuda" if torch.cuda.is_available() else "cpu", Path(tempfile.mkdtemp())
    options = Preprocessing(k=k, features="log-hks")
    scans = index_dataset(BODIES, folder / "cache")  # or a folder of yours
    write_shards(scans, folder / "shards", options, folder / "cache")
    data = load_shards(folder / "shards", folder / "cache")
    samples = MeshSamples(data.train, options)
    batches = MeshBatches(samples.vertex_counts, max_vertices=max_vertices, shuffle=True)
    loader = torch.utils.data.DataLoader(
        samples, batch_sampler=batches, collate_fn=collate_samples, num_workers=workers, pin_memory=device == "cuda"
    )
    model = DiffusionNet(16, len(data.label_names), width=32, blocks=2, outputs_at=data.labels_at).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for batch in (batch.to(device) for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        logits = model(batch.features, batch.operators)
        torch.nn.functional.cross_entropy(logits, batch.labels).backward()
        optimizer.step()
    model.eval()
    for batch in (sample.to(device) for sample in MeshSamples(data.test, options)):
        right += int((model(batch.features, batch.operators).argmax(1) == batch.labels).sum())
        count += len(batch.labels)
    print(f"test accuracy {right / count:.3f} after {epochs} epochs of {len(batches)} batches")


if __name__ == "__main__":
    main()
