"""Networks on kernels: a block as one node of autograd, and launches for all blocks, with the same results."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import trimesh
from kernel_accuracy import relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffnet import DiffusionNet, collate, model, precompute
from diffnet.geometry import Operators

pytest.importorskip("triton")

from diffnet.ops.diffusion_features import op as block_module
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
    original = block_module.one_node

    def counted(*arguments: Any) -> Tensor:
        found.append(None)
        return original(*arguments)

    monkeypatch.setattr(block_module, "one_node", counted)
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
    """The backward pass runs a block again, outside of the network's pass, with the random numbers of its first run."""

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, operators: Operators) -> Any:
            return checkpoint(self.block, x, operators, use_reentrant=False)

    expected = results(network, operators)
    network.blocks = nn.ModuleList(Checkpointed(block) for block in network.blocks)
    assert same(results(network, operators), expected)


def test_other_backends_of_parts(network: DiffusionNet, operators: Operators, calls: list[None]) -> None:
    network.eval()
    expected = results(network, operators)
    network.blocks[0].mlp.backend = "torch"
    torch.testing.assert_close(results(network, operators), expected, rtol=1e-3, atol=1e-4)
    assert len(calls) == 3


def test_no_second_derivative(network: DiffusionNet, operators: Operators) -> None:
    x = torch.randn(operators.num_vertices, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(network.blocks[0](x, operators).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once; backend="torch" has'):
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
    assert all(relative(a, b.double()) <= 2e-3 for a, b in zip(together, apart, strict=True))


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


@contextmanager
def one_by_one() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "shared_launches", lambda network, modules, *_: [{}] * len(modules))
        yield


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
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
    times = [block.diffusion.time.detach().clone() for block in network.blocks]
    found = results(network, operators)
    assert conversions == [8]
    assert all(torch.equal(b.diffusion.time, t.clamp(min=0)) for b, t in zip(network.blocks, times, strict=True))
    assert any((t < 0).any() for t in times)
    with one_by_one():
        expected = results(network, operators)
    assert conversions == [8, 1, 3, 3, 1]
    assert len(found) == 2 + len(list(network.parameters()))
    assert same(found, expected)


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
    network.eval()
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


def test_other_parameters_of_a_call(network: DiffusionNet, operators: Operators) -> None:
    network.eval()
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
