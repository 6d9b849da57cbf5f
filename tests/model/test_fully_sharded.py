"""Networks whose weights FSDP divides over ranks learn what one process learns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed
from shapes import ellipsoid
from torch import Tensor
from two_ranks import run_ranks

from diffnet import DiffusionNet, precompute
from diffnet.geometry import Operators
from diffnet.options import DiffusionMode

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="copies of this process"),
    pytest.mark.usefixtures("one_thread"),
]

Batch = tuple[Tensor, Operators, Tensor]


def network(diffusion: DiffusionMode) -> DiffusionNet:
    """Two blocks whose learned times begin near 0."""
    torch.manual_seed(0)
    found = DiffusionNet(3, 4, width=8, blocks=2, diffusion=diffusion, dropout=0).double()
    for block in found.blocks:
        block.diffusion.time.data = torch.linspace(0, 0.02, 8, dtype=torch.float64)
    return found


def optimizer_of(name: str, model: DiffusionNet) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), 0.03)
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)


def loss_of(model: DiffusionNet, batch: Batch) -> Tensor:
    features, operators, labels = batch
    return torch.nn.functional.cross_entropy(model(features, operators), labels)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_times_that_fall_below_zero(diffusion: DiffusionMode, name: str, tmp_path: Path) -> None:
    """Weights after 12 steps, with the network alone and with its blocks divided, too, against a plain loop."""
    batches: list[Batch] = []
    for seed in range(6):
        operators = precompute(ellipsoid(seed, 1), k=8).to(dtype=torch.float64)
        rng = torch.Generator().manual_seed(seed)
        features = torch.randn(operators.num_vertices, 3, dtype=torch.float64, generator=rng)
        batches.append((features, operators, torch.randint(4, (len(features),), generator=rng)))
    model = network(diffusion)
    optimizer, below = optimizer_of(name, model), 0
    for step in range(12):
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches[step % 3 :: 3]) / 2).backward()
        optimizer.step()
        below += sum(int((block.diffusion.time < 0).sum()) for block in model.blocks)
    assert below > 0
    run_ranks(_train_shares, diffusion, name, batches, tmp_path)
    for found in torch.load(tmp_path / "weights.pt"):
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-14)


def _train_shares(rank: int, diffusion: DiffusionMode, name: str, batches: list[Batch], folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo")
    every = []
    for with_blocks in (False, True):
        model = network(diffusion)
        for module in [*(model.blocks if with_blocks else []), model]:
            fully_shard(module)
        optimizer = optimizer_of(name, model)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, batches[step % 3 + 3 * rank]).backward()
            optimizer.step()
        every.append([p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)])
    if rank == 0:
        torch.save([[p.detach() for p in found] for found in every], folder / "weights.pt")
    torch.distributed.destroy_process_group()
