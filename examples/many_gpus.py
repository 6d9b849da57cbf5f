"""Train on several GPUs, or on several processes of the CPU: torchrun --nproc-per-node 2 examples/many_gpus.py"""

import torch
from torch.nn.parallel import DistributedDataParallel

from diffnet import DiffusionNet, graphed
from diffnet.data import BODIES, MeshBatches, MeshSamples, Preprocessing, collate_samples, load_dataset


def main(epochs: int = 5, meshes: int = 8, k: int = 32) -> None:
    has_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    bodies = load_dataset(BODIES, labels_at="vertices").train[:meshes]
    data = MeshSamples(bodies, Preprocessing(k=k, features="hks"), "cache")
    batches = MeshBatches(data.vertex_counts, meshes=4, shuffle=True, num_replicas=ranks, rank=rank)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=collate_samples)
    model = DistributedDataParallel(graphed(DiffusionNet(16, 8, width=32, blocks=2).to(device)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in (batch.to(device) for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.features, batch.operators), batch.labels)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss:.3f} of the last share of rank 0")
    del model, optimizer  # they use the process group
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
