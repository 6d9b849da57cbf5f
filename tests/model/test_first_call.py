"""Kernels are compiled before the first call of a network on a GPU. Tests without a GPU pass a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trimesh

from diffnet import DiffusionNet, Operators, first_call, precompute
from diffnet.ops.common import launcher


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The networks whose kernels were compiled."""
    found: list[Any] = []
    # Compiling needs a GPU, and nothing public tells that it is wanted.
    monkeypatch.setattr(first_call, "_compile", lambda network, features, operators: found.append(network))
    return found


@pytest.fixture(scope="module")
def operators() -> Operators:
    return precompute(trimesh.creation.icosphere(1), k=4)


def call(network: DiffusionNet, operators: Operators, **changes: Any) -> None:
    values = {"is_cuda": True, "requires_grad": False, "dtype": torch.float32, "device": torch.device("cuda", 0)}
    first_call.compile_before_first_call(network, SimpleNamespace(**(values | changes)), operators)  # type: ignore[arg-type]


def test_once_for_each_kind_of_call(compiled: list[Any], operators: Operators) -> None:
    network, other = DiffusionNet(3, 2, width=8, blocks=1), DiffusionNet(3, 2, width=8, blocks=1)
    for each in (network, network, other, network):
        call(each, operators)
    assert compiled == [network, other]
    network.eval()
    call(network, operators)
    with torch.no_grad():
        call(network, operators)
    call(network, operators)
    assert compiled == [network, other, network, network]


def test_not_on_the_cpu(compiled: list[Any], operators: Operators) -> None:
    call(DiffusionNet(3, 2, width=8, blocks=1), operators, is_cuda=False)
    assert compiled == []


def test_not_with_hooks_inside(compiled: list[Any], operators: Operators) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    network.blocks[0].register_forward_hook(lambda *arguments: None)
    call(network, operators)
    assert compiled == []


def test_not_while_kernels_are_compiled_already(
    compiled: list[Any], operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    monkeypatch.setattr(first_call, "compiles_only", lambda: True)
    call(network, operators)
    monkeypatch.setattr(first_call, "compiles_only", launcher.compiles_only)
    call(network, operators)
    assert compiled == []


@pytest.mark.gpu
def test_the_first_step_is_like_others(operators: Operators) -> None:
    """Compiling before the first call changes no gradients, no random numbers and no values."""
    torch.manual_seed(0)
    network = DiffusionNet(3, 2, width=16, blocks=1).cuda()
    moved, outs = operators.to("cuda"), []
    for _ in range(2):
        torch.manual_seed(1)
        out = network(moved.frames[:, 2], moved)
        assert all(p.grad is None for p in network.parameters())
        outs.append(out)
    assert torch.equal(*outs)
