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

pytestmark = pytest.mark.skipif(os.name != "posix", reason="copies")

Batch = tuple[Tensor, Operators, Tensor]


def network(diffusion: DiffusionMode) -> DiffusionNet:
    """Two blocks whose learned times begin near 0."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=2, diffusion=diffusion, dropout=0).double()
    for block in model.blocks:
        block.diffusion.time.data = torch.linspace(0, 0.02, 8, dtype=torch.float64)
    return model


def train(model: DiffusionNet, name: str, batches: list[list[Batch]]) -> int:
    """Take 12 steps with the mean loss of batches. Returns how many times were below 0 after a step."""
    # The diagonal of A_im has gradient 0 up to rounding, which a small eps would turn into steps.
    chosen = {"lr": 0.03, "eps": 1e-4} if name == "AdamW" else {"lr": 0.5, "momentum": 0.9}
    optimizer, below = getattr(torch.optim, name)(model.parameters(), **chosen), 0
    for step in range(12):
        optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(model(x, o), y) for x, o, y in batches[step % len(batches)]]
        torch.stack(losses).mean().backward()
        optimizer.step()
        below += sum(int((block.diffusion.time < 0).sum()) for block in model.blocks)
    return below


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_times_that_fall_below_zero(diffusion: DiffusionMode, name: str, tmp_path: Path) -> None:
    """The network alone is divided, or its blocks, too."""
    rng, batches = torch.Generator().manual_seed(0), []
    for seed in range(0, 6, 2):
        operators = [precompute(ellipsoid(seed + rank, 1), k=8).to(dtype=torch.float64) for rank in range(2)]
        drawn = torch.randn(2, 42, 3, dtype=torch.float64, generator=rng), torch.randint(4, (2, 42), generator=rng)
        batches.append(list(zip(drawn[0], operators, drawn[1], strict=True)))
    model = network(diffusion)
    assert train(model, name, batches) > 0
    run_ranks(_train_shares, diffusion, name, batches, tmp_path)
    for weights in torch.load(tmp_path / "weights.pt"):
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-14)


def _train_shares(rank: int, diffusion: DiffusionMode, name: str, batches: list[list[Batch]], folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    every = []
    for with_blocks in (False, True):
        model = network(diffusion)
        for module in [*(model.blocks if with_blocks else []), model]:
            fully_shard(module)
        train(model, name, [[parts[rank]] for parts in batches])
        every.append([p.detach().full_tensor() for p in model.parameters()])
    if rank == 0:
        torch.save(every, folder / "weights.pt")
    torch.distributed.destroy_process_group()
