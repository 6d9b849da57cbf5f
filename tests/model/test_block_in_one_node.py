"""A block that runs as one node of autograd gives the results of its operations one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import trimesh
from kernel_accuracy import relative
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffnet import DiffusionNet, collate, precompute
from diffnet import block as block_module
from diffnet.geometry import Operators

pytest.importorskip("triton")

from diffnet.ops.gradient_features import kernels
from diffnet.ops.mlp import kernels as mlp_kernels


@pytest.fixture(scope="module")
def operators() -> Operators:
    meshes = trimesh.creation.icosahedron(), trimesh.creation.box()
    return collate([precompute(mesh, k=5) for mesh in meshes]).with_gradient_evecs()


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[DiffusionNet]:
    """With a time below 0 and weights in two parts (bf16x3), or in three with the parameter "highest"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(getattr(request, "param", "high"))
    torch.manual_seed(0)
    network = DiffusionNet(3, 4, width=16, blocks=2, dropout=0.3, backend="triton")
    for block in network.blocks:
        block.diffusion.time.data.uniform_(-0.1, 0.3)
    yield network
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Has one element for each block that ran as one node."""
    found: list[None] = []
    original = block_module.diffusion_block

    def counted(*arguments: Any) -> Tensor:
        found.append(None)
        return original(*arguments)

    monkeypatch.setattr(block_module, "diffusion_block", counted)
    return found


def results(network: DiffusionNet, operators: Operators) -> list[Tensor]:
    network.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(operators.num_vertices, 3, requires_grad=True)
    out = network(x, operators)
    out.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in network.parameters())]
    return [out.detach(), *(g.clone() for g in gradients if g is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("network", ["highest", "high"], indirect=True)
def test_same_results_with_a_hook_on_the_mlp(network: DiffusionNet, operators: Operators, calls: list[None]) -> None:
    """A hook expects a call of the MLP, so the operations run one after the other. The random numbers are the same."""
    found = results(network, operators)
    assert len(calls) == 2
    assert len(found) == 2 + len(list(network.parameters()))
    called = []
    handles = [b.mlp.register_forward_hook(lambda *arguments: called.append(None)) for b in network.blocks]
    assert same(results(network, operators), found)
    assert len(called) == len(calls) == 2
    for handle in handles:
        handle.remove()
    network.blocks[1].mlp.forward = network.blocks[1].mlp.forward
    assert same(results(network, operators), found)
    assert len(calls) == 3


def test_random_numbers_of_checkpointed_blocks(network: DiffusionNet, operators: Operators) -> None:
    """The backward pass runs a block again, with the random numbers of its first run."""
    expected = results(network, operators)
    for block in network.blocks:
        forward = block.forward
        block.forward = lambda x, o, forward=forward: checkpoint(forward, x, o, use_reentrant=False)
    assert same(results(network, operators), expected)


def test_other_backends_of_parts(network: DiffusionNet, operators: Operators, calls: list[None]) -> None:
    network.eval()
    expected = results(network, operators)
    network.blocks[0].mlp.backend = "torch"
    for a, b in zip(results(network, operators), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert len(calls) == 3


def test_no_second_derivative(network: DiffusionNet, operators: Operators) -> None:
    x = torch.randn(operators.num_vertices, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(network.blocks[0](x, operators).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_gradients_of_the_operators(network: DiffusionNet, operators: Operators, calls: list[None]) -> None:
    evecs = operators.evecs.clone().requires_grad_()
    network(torch.randn(len(evecs), 3), replace(operators, evecs=evecs)).square().sum().backward()
    assert evecs.grad is not None
    assert calls == []


@pytest.mark.parametrize("network", ["highest"], indirect=True)
def test_projections_share_the_launch_of_the_weights_in_16_bits(
    network: DiffusionNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are as many eigenpairs as channels. Gradients are those of single operations, which a hook brings."""
    projections: list[None] = []

    def counted(*arguments: Any) -> tuple[Tensor, int, Tensor | None]:
        projections.append(None)
        return project_spans(*arguments)

    project_spans = kernels.project_spans
    monkeypatch.setattr(kernels, "project_spans", counted)
    meshes = [trimesh.creation.icosphere(1) for _ in range(2)]
    operators = collate([precompute(mesh, k=16) for mesh in meshes]).with_gradient_evecs()
    with torch.autocast("cpu", torch.float16):
        together = results(network, operators)
        assert projections == []
        for block in network.blocks:
            block.mlp.register_forward_hook(lambda *_: None)
        apart = results(network, operators)
    assert len(projections) == len(network.blocks)
    assert len(together) == len(apart) > 20
    for a, b in zip(together, apart, strict=True):
        assert relative(a, b.double()) <= 2e-3


@pytest.mark.parametrize("network", ["highest"], indirect=True)
@pytest.mark.parametrize("keep", [False, True], ids=["once", "kept"])
def test_memory_of_the_mlp_is_free_before_the_gradients_of_the_features(
    network: DiffusionNet, operators: Operators, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """Unless the graph is kept, which then gives the same gradients again."""
    read: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def noting_mlp(grad: Tensor, inputs: Any, weights: Any, hidden: Any, *arguments: Any) -> list[Tensor]:
        read[:] = [weakref.ref(x) for x in (*inputs, *hidden)]
        return mlp_backward(grad, inputs, weights, hidden, *arguments)

    def noting_features(*arguments: Any, **options: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in read))
        return features_backward(*arguments, **options)

    mlp_backward, features_backward = mlp_kernels.backward, kernels.backward
    monkeypatch.setattr(mlp_kernels, "backward", noting_mlp)
    monkeypatch.setattr(kernels, "backward", noting_features)
    x = torch.randn(operators.num_vertices, 16, requires_grad=True)
    out = network.blocks[1](x, operators).square().sum()
    found = torch.autograd.grad(out, [x, *network.blocks[1].parameters()], retain_graph=keep)
    if keep:
        assert same(list(torch.autograd.grad(out, [x, *network.blocks[1].parameters()])), list(found))
        assert alive[0] > 1
    assert alive[-1] == 1  # x itself


@pytest.mark.parametrize(("network", "kept"), [("highest", 3), ("high", 5)], indirect=["network"])
def test_exact_float32_keeps_fewer_tensors(network: DiffusionNet, operators: Operators, kept: int) -> None:
    """x, the features and the first hidden layer. The diffused x and the second hidden layer are computed again."""
    block, seen = network.blocks[0], set[int]()
    shape = operators.num_vertices, 16
    x = torch.randn(shape, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == shape:
            seen.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, operators)
    assert len(seen) == kept
    del out
