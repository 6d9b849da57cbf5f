"""What autograd sees of the parameters of a network that runs as CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import counted_replays, with_graphs
from torch import Tensor, nn

from diffnet import DiffusionNet, Operators, precompute
from diffnet.cuda_graphs import graphed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sphere() -> Operators:
    return precompute(trimesh.creation.icosphere(1), k=6).with_gradient_evecs()


class Network(nn.Module):
    """A network with an unused parameter, one of another dtype, and one of an odd size."""

    outputs_at = "vertices"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = DiffusionNet(3, 5, width=8, blocks=1, dropout=0.0, gradient="spectral")
        self.unused = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        return (self.net(x, operators) + self.bias) * self.scale


def pair() -> tuple[Network, Network]:
    """The same network without and with graphs."""
    plain = Network()
    return plain, with_graphs(plain)


def loss(model: nn.Module, operators: Operators) -> Tensor:
    out: Tensor = model(operators.frames[:, 2], operators)
    return out.square().mean()


def assert_same_gradients(plain: nn.Module, model: nn.Module) -> None:
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def nodes(model: nn.Module, operators: Operators) -> list[Any]:
    """The nodes of autograd that stand for the parameters, one for each dtype."""
    node = loss(model, operators).grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
    while "Replay" not in node.name():
        node = node.next_functions[0][0]
    return [each for each, _ in node.next_functions if each is not None]


def test_autograd_grad_of_several_forward_passes(sphere: Operators) -> None:
    found = []
    for model in pair():
        used = [p for p in model.parameters() if p is not model.unused]
        both = loss(model, sphere) + 2 * loss(model, sphere)
        found.append([*torch.autograd.grad(both, used, retain_graph=True), *torch.autograd.grad(both, used[3:5])])
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_gradients_of_gradients_are_refused(sphere: Operators) -> None:
    _, model = pair()
    (grad,) = torch.autograd.grad(loss(model, sphere), [model.bias], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_hooks_see_the_gradients_of_parameters(sphere: Operators) -> None:
    plain, model = pair()
    loss(model, sphere).backward()  # the hooks come after the nodes of autograd have been made
    model.zero_grad()
    for each in (plain, model):
        called: list[str] = []
        bias = each.bias
        bias.register_hook(lambda grad, called=called: called.append("tensor") or 3 * grad)
        bias.register_post_accumulate_grad_hook(lambda p, called=called: called.append("accumulated"))
        node = bias.view_as(bias).grad_fn.next_functions[0][0]  # as DistributedDataParallel does it
        node.register_hook(lambda *_, called=called: called.append("node"))
        for _ in range(2):
            loss(each, sphere).backward()
        assert sorted(called) == ["accumulated"] * 2 + ["node"] * 2 + ["tensor"] * 2
    assert_same_gradients(plain, model)


def test_frozen_parameters_get_no_gradient(sphere: Operators) -> None:
    plain, model = pair()
    for frozen in (True, False, True):
        for each in (plain, model):
            each.net.first.requires_grad_(not frozen)
            each.zero_grad()
            loss(each, sphere).backward()
        assert (model.net.first.weight.grad is None) == frozen
        assert_same_gradients(plain, model)


def test_gradients_are_not_copied_and_can_be_kept(sphere: Operators) -> None:
    _, model = pair()
    loss(model, sphere).backward()
    kept = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    floats = [grad for grad in kept.values() if grad.dtype == torch.float32]
    assert len({grad.untyped_storage().data_ptr() for grad in floats}) == 1
    assert all(grad.data_ptr() % 16 == 0 for grad in floats if grad.numel() % 8 == 0)
    before = {name: grad.clone() for name, grad in kept.items()}
    model.zero_grad()
    for _ in range(2):
        (2 * loss(model, sphere)).backward()
    for name, grad in kept.items():
        assert torch.equal(grad, before[name])
    kept["bias"].add_(1)
    assert all(torch.equal(grad, before[name]) for name, grad in kept.items() if name != "bias")
    assert kept["net.first.weight"]._version == 0


def test_autograd_makes_new_nodes_only_when_it_must(sphere: Operators) -> None:
    _, model = pair()
    first = nodes(model, sphere)
    assert len(first) == 2  # one for each dtype
    assert nodes(model, sphere) == first
    model.eval()
    assert nodes(model, sphere) == first
    with torch.no_grad():
        loss(model, sphere)
    assert nodes(copy.deepcopy(model), sphere) != first
    assert nodes(model, sphere) == first
    model.bias = nn.Parameter(torch.ones(5))
    second = nodes(model, sphere)
    assert not set(second) & set(first)
    model.double().float()  # gives parameters new nodes, which others may watch
    model.scale.data = model.scale.data.double()
    third = nodes(model, sphere)
    assert not set(third) & set(second)
    type(model).forward(model, sphere.frames[:, 2], sphere)
    assert nodes(model, sphere) == third
    inner = model.net.register_forward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match="a module has hooks"):
        loss(model, sphere)
    inner.remove()
    assert not set(nodes(model, sphere)) & set(third)


def test_parameters_that_are_results_get_gradients(sphere: Operators) -> None:
    found = []
    for model in pair():
        w = torch.ones(5, requires_grad=True)
        for _ in range(2):
            changed = {"bias": 2 * w}
            torch.func.functional_call(model, changed, (sphere.frames[:, 2], sphere)).square().mean().backward()
        found.append(w.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_lazy_parameters(sphere: Operators) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = Network(), nn.LazyLinear(2)

        def forward(self, x: Tensor, operators: Operators) -> Tensor:
            out: Tensor = self.last(self.net(x, operators).float())
            return out

    model = with_graphs(Lazy())
    with pytest.warns(RuntimeWarning, match="a module has hooks"):  # that make the lazy parameters
        loss(model, sphere)
    assert counted_replays(lambda: loss(model, sphere).backward()) == 2
    assert model.last.weight.grad is not None
    with torch.no_grad():
        model.last.weight.data = torch.zeros(2, 5)
        torch.testing.assert_close(loss(model, sphere), model.last.bias.square().mean())


@pytest.mark.gpu
def test_steps_on_several_streams() -> None:
    """Autograd warns if nodes of parameters belong to another stream than those of a network."""
    operators = precompute(trimesh.creation.icosphere(3), k=16).to("cuda")
    plain = Network().cuda()
    model = graphed(copy.deepcopy(plain), outputs_at="vertices", first_visits=0)
    side = torch.cuda.Stream()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream(), side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for each in (plain, model):
                    each.zero_grad()
                    loss(each, operators).backward()
            torch.cuda.current_stream().wait_stream(stream)
            assert_same_gradients(plain, model)


@pytest.mark.gpu
def test_a_whole_step_is_recorded_after_steps_with_graphs() -> None:
    operators = precompute(trimesh.creation.icosphere(3), k=16).to("cuda").prepared(torch.float32)
    model = graphed(Network().cuda(), outputs_at="vertices", first_visits=0)

    def step() -> None:
        model.zero_grad()
        loss(model, operators).backward()

    step()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            type(model).forward(model, operators.frames[:, 2], operators).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    for p, grad in zip(model.parameters(), expected, strict=True):
        if grad is not None:
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
