"""Weights are converted, times set to 0, and seeds drawn once for all blocks. What a hook changes is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import trimesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffnet import DiffusionNet, model, precompute
from diffnet.geometry import Operators

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def operators() -> Operators:
    return precompute(trimesh.creation.icosahedron(), k=8).with_gradient_evecs()


@pytest.fixture
def network() -> Iterator[DiffusionNet]:
    """In the arithmetic in which kernels convert weights (bf16x3), with a time below 0."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    network = DiffusionNet(3, 4, width=16, blocks=2, dropout=0.0, backend="triton")
    for block in network.blocks:
        block.diffusion.time.data.uniform_(-1.0, 1.0)
    yield network
    torch.set_float32_matmul_precision(before)


def results(network: DiffusionNet, x: Tensor, operators: Operators) -> list[Tensor]:
    network.zero_grad()
    out = network(x, operators)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@contextmanager
def one_by_one() -> Iterator[None]:
    """A context without shared launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "shares_launches", lambda *_: False)
        yield


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices each conversion takes."""
    from diffnet.ops.common import matmul

    counts: list[int] = []
    kernel = matmul.operands_forward_kernel

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            def launch(matrices: Any, *arguments: Any, **options: Any) -> None:
                counts.append(len(matrices))
                kernel[grid](matrices, *arguments, **options)

            return launch

    monkeypatch.setattr(matmul, "operands_forward_kernel", Counted())
    return counts


def test_one_conversion_and_the_same_results(
    network: DiffusionNet, operators: Operators, conversions: list[int]
) -> None:
    x = torch.randn(operators.num_vertices, 3)
    times = [block.diffusion.time.detach().clone() for block in network.blocks]
    found = results(network, x, operators)
    assert conversions == [8]
    assert all(torch.equal(b.diffusion.time, t.clamp(min=0)) for b, t in zip(network.blocks, times, strict=True))
    assert any((t < 0).any() for t in times)
    with one_by_one():
        expected = results(network, x, operators)
    assert conversions == [8, 1, 3, 3, 1]
    assert len(found) == 1 + len(list(network.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("gradient", ["spectral", "sparse"])
def test_seeds_of_dropout_are_drawn_once(gradient: Any, operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several operations compute a block, and for a block that has two places."""
    options: Any = {"mlp_hidden": [16], "dropout": 0.5, "gradient": gradient, "backend": "triton"}
    network = DiffusionNet(3, 4, width=16, blocks=3, **options)
    network.blocks[2] = network.blocks[0]
    x = torch.randn(operators.num_vertices, 3)
    torch.manual_seed(0)
    with one_by_one():
        expected = network(x, operators)
    draws: list[Any] = []
    randint = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **o: draws.append(a[1]) or randint(*a, **o))
    torch.manual_seed(0)
    assert torch.equal(network(x, operators), expected)
    assert draws == [(3, 2)]


def test_changed_weights_are_seen(network: DiffusionNet, operators: Operators, conversions: list[int]) -> None:
    """By an optimizer between two calls, and by a hook within a call, also if autograd doesn't see the change."""
    x = torch.randn(operators.num_vertices, 3)
    with torch.no_grad():
        first = network(x, operators)
        for weight in network.blocks[1].mlp.parameters():
            weight.mul_(2.0)
        second = network(x, operators)
        assert not torch.equal(first, second)
        with one_by_one():
            assert torch.equal(second, network(x, operators))
        conversions.clear()

        def halve(module: Any, arguments: Any) -> None:
            for weight in module.mlp.parameters():
                weight.data.mul_(0.5)

        handle = network.blocks[1].register_forward_pre_hook(halve)
        assert torch.equal(network(x, operators), first)
        assert conversions == [1, 3, 3, 1]  # with hooks, each module converts its own weights
        handle.remove()

        def double_next(module: Any, arguments: Any, output: Any) -> None:
            for weight in network.blocks[1].mlp.parameters():
                weight.mul_(2.0)

        handle = network.blocks[0].register_forward_hook(double_next)
        assert torch.equal(network(x, operators), second)
        handle.remove()

        def replace_next(module: Any, arguments: Any, output: Any) -> None:
            for layer in network.blocks[1].mlp.layers:
                layer.weight = nn.Parameter(2.0 * layer.weight)

        handle = network.blocks[0].register_forward_hook(replace_next)
        for _ in range(2):  # the second time, no weight has been changed in place
            replaced = network(x, operators)
        handle.remove()
        assert not torch.equal(replaced, second)
        assert torch.equal(replaced, network(x, operators))


def test_blocks_on_their_own_do_both(network: DiffusionNet, operators: Operators, conversions: list[int]) -> None:
    x = torch.randn(operators.num_vertices, 16)
    network.blocks[0](x, operators)
    assert conversions == [3]
    assert (network.blocks[0].diffusion.time >= 0).all()
    assert (network.blocks[1].diffusion.time < 0).any()


def test_checkpointed_blocks(network: DiffusionNet, operators: Operators) -> None:
    """The backward pass runs the blocks again, outside of the network's forward pass."""

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, operators: Operators) -> Any:
            return checkpoint(self.block, x, operators, use_reentrant=False)

    x = torch.randn(operators.num_vertices, 3)
    expected = results(network, x, operators)
    network.blocks = nn.ModuleList(Checkpointed(block) for block in network.blocks)
    assert all(torch.equal(a, b) for a, b in zip(results(network, x, operators), expected, strict=True))


def test_other_parameters_of_a_call(network: DiffusionNet, operators: Operators) -> None:
    x = torch.randn(operators.num_vertices, 3)
    others = {name: p.detach() * 1.5 for name, p in network.named_parameters()}
    out = torch.func.functional_call(network, others, (x, operators))
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(1.5)
    assert torch.equal(out, network(x, operators))


def test_parametrized_weights_are_computed_once(network: DiffusionNet, operators: Operators) -> None:
    """Spectral normalization changes its state in every computation."""
    calls = []

    class Scaled(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(None)
            return weight * 3.0

    torch.nn.utils.parametrize.register_parametrization(network.last, "weight", Scaled())
    calls.clear()
    out = network(torch.randn(operators.num_vertices, 3), operators)
    assert out.isfinite().all()
    assert len(calls) == 1
