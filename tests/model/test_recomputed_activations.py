"""Blocks that are computed again in the backward pass."""

from __future__ import annotations

import pytest
import torch
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, precompute
from diffnet.geometry import Operators

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def step(network: DiffusionNet, features: Tensor, operators: Operators) -> tuple[list[Tensor], int]:
    """The outputs and all gradients, and the bytes that the backward pass keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(0)  # of dropout
    network.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = network(features, operators)
    outputs.square().mean().backward()
    return [outputs.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_steps_are_the_same_and_keep_less(diffusion: str, dropout: float, device: str) -> None:
    operators = precompute(ellipsoid(0, 3), k=16).to(device)
    network = DiffusionNet(3, 4, width=32, blocks=4, dropout=dropout, diffusion=diffusion).to(device)
    features = torch.randn(operators.num_vertices, 3, device=device)
    expected, much = step(network, features, operators)
    network.recompute_activations = True
    found, little = step(network, features, operators)
    assert little < 0.6 * much
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
