"""The same with GraphedStep and one loss for all: torchrun --nproc-per-node 2 examples/many_gpus_step.py"""

import torch

from diffnet import DiffusionNet, GraphedStep
from diffnet.data import BODIES, MeshBatches, MeshSamples, Preprocessing, collate_samples, load_dataset


def main(epochs: int = 5, meshes: int = 8, k: int = 32) -> None:
    has_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    bodies = load_dataset(BODIES, labels_at="vertices").train[:meshes]
    samples = MeshSamples(bodies, Preprocessing(k=k, features="hks"), "cache")
    batches = MeshBatches(samples.vertex_counts, meshes=4, shuffle=True, num_replicas=ranks, rank=rank)
    loader = torch.utils.data.DataLoader(samples, batch_sampler=batches, collate_fn=collate_samples)
    torch.manual_seed(0)  # the same weights in all processes
    model = DiffusionNet(16, 8, width=32, blocks=2, dropout=0.0).to(device)
    step = GraphedStep(model, torch.optim.Adam(model.parameters(), lr=1e-2), torch.nn.functional.cross_entropy)
    for batch in (batch.to(device) for _ in range(epochs) for batch in loader):
        step.add(batch.features, batch.operators, batch.labels)
        loss = step.update(torch.distributed.all_reduce)
    if rank == 0:
        print(f"loss {loss:.3f} of the last batch")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
