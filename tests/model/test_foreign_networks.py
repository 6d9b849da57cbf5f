"""Networks of users, and networks that change, under `graphed`: each is right, or refused with one warning."""

from __future__ import annotations

import copy
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from graph_emulator import DEVICES, Foreign, ReplayedGraph, network as small, with_graphs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from diffnet import Operators, precompute
from diffnet.cuda_graphs import graphed, runtime
from diffnet.cuda_graphs.forward import use_graphs
from diffnet.cuda_graphs.module_state import MAX_NEW_STATES


def results(network: nn.Module, operators: Operators) -> list[Any]:
    x = torch.randn(operators.num_vertices, 3, generator=torch.Generator().manual_seed(1)).to(operators.device)
    x.requires_grad_()
    network.zero_grad()
    out = network(x, operators)
    first = out[0] if isinstance(out, tuple) else out
    if first.requires_grad:
        first.float().sin().mean().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in (x, *network.parameters())]
    return [first.detach(), *grads, *(buffer.clone() for buffer in network.buffers())]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


class Calls:
    def __init__(self, network: nn.Module, device: str, first_visits: int = 1) -> None:
        self.plain = copy.deepcopy(network).to(device)
        self.model = with_graphs(network, device, first_visits)
        self.device = device

    def each(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.model

    def compare(self, meshes: list[Operators], times: int = 2) -> None:
        for operators in [o.to(self.device) for o in meshes] * times:
            assert_same(results(self.model, operators), results(self.plain, operators))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    counts: list[int] = []
    for graph in (ReplayedGraph, torch.cuda.CUDAGraph):
        replay = graph.replay

        def counted(self: Any, replay: Any = replay) -> None:
            counts.append(1)
            replay(self)

        monkeypatch.setattr(graph, "replay", counted)
    return counts


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random numbers of Python": (lambda: Foreign(lambda m, y, x, o: y * random.random()), "of Python or NumPy"),
    "random numbers of NumPy": (lambda: Foreign(lambda m, y, x, o: y * np.random.rand()), "of Python or NumPy"),  # noqa: NPY002
    "a generator of NumPy": (
        lambda: Foreign(lambda m, y, x, o: y * m.numbers.random(), numbers=np.random.default_rng(0)),
        "the attribute 'numbers' draws random numbers",
    ),
    "a kept tensor": (lambda: Foreign(lambda m, y, x, o: setattr(m, "seen", y.detach()) or y), "the attribute 'seen'"),
    "a list": (lambda: Foreign(lambda m, y, x, o: m.seen.append(1) or y, seen=[]), "the attribute 'seen'"),
    "an output of two tensors": (lambda: Foreign(lambda m, y, x, o: (y, x)), "not one tensor"),
    "a tensor that is no parameter": (
        lambda: Foreign(lambda m, y, x, o: y * m.scale, scale=None),
        "not as its parameter",
    ),
    "a value read back": (lambda: Foreign(lambda m, y, x, o: y * float(x.detach()[0, 0])), "can't be recorded"),
    "implicit diffusion": (
        lambda: small(diffusion="implicit", gradient="auto"),
        "implicit diffusion reads from the GPU",
    ),
    "TorchScript": (lambda: Foreign(lambda m, y, x, o: m.script(y), script=scripted()), "TorchScript"),
}


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.GELU())


@pytest.mark.parametrize("declared", [False, True])
def test_many_sizes_have_graphs_if_modules_are_declared_to_be_row_wise(
    declared: bool, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    monkeypatch.setattr(runtime, "MAX_EXACT_SIZES", 3)
    network = Foreign(lambda m, y, x, o: F.normalize(y))
    sizes = [precompute(trimesh.creation.cylinder(1, 1, sections=n), k=6) for n in range(10, 15)]
    settings = runtime.Settings(None, 0, (Foreign,) if declared else (), ReplayedGraph)
    model = use_graphs(copy.deepcopy(network), settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operators in sizes * 2:
            results(model, operators)
    if declared:
        assert caught == []
        assert len(replays) == 20
    else:
        (message,) = [str(w.message) for w in caught]
        assert "more than 3 sizes have come" in message
        assert "row_wise=[Foreign]" in message
        assert len(replays) == 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_graphs_would_change_is_refused_once(
    meshes: list[Operators], name: str, device: str, replays: list[int]
) -> None:
    make, reason = REFUSED[name]
    batches = meshes[:1]
    random.seed(0), np.random.seed(0)  # noqa: NPY002
    calls = Calls(make(), device)
    for each in calls.each():
        if "scale" in vars(each):
            each.scale = torch.ones(5, device=device, requires_grad=True)  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for operators in [o.to(device) for o in batches] * 6:
            found = results(calls.model, operators)
    (message,) = [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]
    assert reason in message
    random.seed(0), np.random.seed(0)  # noqa: NPY002
    for operators in [o.to(device) for o in batches] * 6:
        expected = results(calls.plain, operators)
    if name != "a generator of NumPy":
        assert_same(found, expected)
    assert not replays


# A network with a module that is not known gets a graph for each size of a batch, whatever it computes.
RIGHT: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Foreign(lambda m, y, x, o: m.norm(y), norm=nn.BatchNorm1d(5)),
    "mean": lambda: Foreign(lambda m, y, x, o: y - y.mean(0)),
    "attention": lambda: Foreign(lambda m, y, x, o: F.softmax(y @ y.T, 1) @ y),
    "numbers of rows": lambda: Foreign(lambda m, y, x, o: y * len(y) ** -0.5 / o.num_vertices / len(o.faces)),
    "fields of the operators": lambda: Foreign(
        lambda m, y, x, o: y.index_add(0, o.faces[:, 0], (o.mass[:, None] * y * o.normals[:, :1])[o.faces[:, 1]])
    ),
    "last activation": lambda: small(last_activation=lambda y: (y - y.mean(0)) / (y.std(0) + 1e-3)),
    "a linear layer that centers": lambda: centered(),
    "several networks": lambda: Foreign(lambda m, y, x, o: m.other(y, o) + y, other=small(5)),
    "tied weights": lambda: tied(),
    "spectral norm": lambda: Foreign(
        lambda m, y, x, o: m.head(y), head=parametrizations.spectral_norm(nn.Linear(5, 5))
    ),
    "checkpoint": lambda: Foreign(lambda m, y, x, o: checkpoint(m.head, y, use_reentrant=False), head=nn.Linear(5, 5)),
    "frozen and unused": lambda: Foreign(
        lambda m, y, x, o: m.head(y), head=nn.Linear(5, 5).requires_grad_(False), unused=nn.Linear(2, 2)
    ),
    "a cache": lambda: Foreign(lambda m, y, x, o: y * m.ones.setdefault(len(y), torch.ones_like(y)), ones={}),
    "nested graphs": lambda: Foreign(lambda m, y, x, o: m.other(y, o), other=graphed(small(5))),
    "another order of arguments": lambda: Keywords(),
    "no gradient of the features": lambda: Foreign(lambda m, y, x, o: m.net(x.detach(), o)),
}


class Centered(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def centered() -> nn.Module:
    network = small()
    network.last = Centered(8, 5)
    return network


class Keywords(nn.Module):
    """Its parameters have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, feats: Tensor, ops: Operators) -> Tensor:
        return self.net(operators=ops, features=feats)


def tied() -> nn.Module:
    network = Foreign(lambda m, y, x, o: m.b(m.a(y)), a=nn.Linear(5, 5), b=nn.Linear(5, 5))
    network.b.weight = network.a.weight
    return network


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_network_of_a_user_runs_on_graphs(
    meshes: list[Operators], name: str, device: str, replays: list[int]
) -> None:
    calls = Calls(RIGHT[name](), device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls.compare(meshes, times=3)
    assert len(replays) >= 4


def patch(network: Any) -> None:
    """Patch the method of one submodule, as libraries for debugging do."""
    head = network.head
    head.forward = lambda x: F.linear(x, head.weight) + 1


@dataclass
class Config:
    scale: float = 1.0


def new_head(network: Any) -> None:
    """Let the new parameters lie where the old ones were, if the allocator likes."""
    del network.head
    network.head = nn.Linear(5, 4).to(network.net.last.weight.device)
    with torch.no_grad():
        network.head.weight.fill_(0.1), network.head.bias.zero_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "outputs at": lambda m: [setattr(each, "outputs_at", "global_mean") for each in (m, m.net)],
    "number": lambda m: setattr(m, "scale", 0.5),
    "number that is deleted and another one": lambda m: (delattr(m, "scale"), setattr(m, "factor", 2.0)),
    "slope": lambda m: setattr(m.activation, "negative_slope", 0.7),
    "tensor": lambda m: setattr(m, "shift", torch.full_like(m.shift, 3)),
    "tensor in place": lambda m: m.shift.fill_(3),
    "tensor of the CPU in place": lambda m: m.factor_of_host.fill_(3),
    "forward of a submodule": patch,
    "function": lambda m: setattr(m, "compute", lambda m, y, x, o: 2 * m.head(y)),
    "head": new_head,
    "list in a dictionary": lambda m: m.options["a"].append(7.0),
    "dataclass": lambda m: setattr(m.config, "scale", 5.0),
    "namespace": lambda m: setattr(m.namespace, "scale", 5.0),
    "frozen": lambda m: m.head.requires_grad_(False),
    "weight": lambda m: setattr(m.head.weight, "data", torch.full_like(m.head.weight, 0.3)),
    "weight in place": lambda m: m.head.load_state_dict({k: v + 1 for k, v in m.head.state_dict().items()}),
    "dtype": lambda m: m.double(),
    "class": lambda m: setattr(m.head, "__class__", Doubled),
    "buffer": lambda m: m.register_buffer("offset", torch.full_like(m.offset, 2)),
    "submodule": lambda m: m.net.blocks.append(copy.deepcopy(m.net.blocks[0])),
    "training": lambda m: m.eval(),
}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changing() -> nn.Module:
    def compute(m: Any, y: Tensor, x: Tensor, o: Operators) -> Tensor:
        factors = getattr(m, "scale", 0.1) * sum(m.options["a"]) * m.config.scale * m.namespace.scale
        y = m.dropout(m.head(m.activation(y.to(m.head.weight.dtype)))) * m.factor_of_host * getattr(m, "factor", 1.0)
        return y * factors + m.shift + m.offset

    network = Foreign(
        compute,
        head=nn.Linear(5, 5),
        activation=nn.LeakyReLU(0.2),
        dropout=nn.Dropout(0.0),
        scale=1.5,
        shift=torch.ones(1),
        factor_of_host=torch.tensor(1.5),
        options={"a": [1.0]},
        config=Config(),
        namespace=types.SimpleNamespace(scale=2.0),
    )
    network.outputs_at = "vertices"
    network.register_buffer("offset", torch.zeros(1))
    return network


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(meshes: list[Operators], name: str, device: str, replays: list[int]) -> None:
    calls = Calls(changing(), device)
    for each in calls.each():
        each.shift = each.shift.to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls.compare(meshes[:1])
        for each in calls.each():
            CHANGES[name](each)
        before = len(replays)
        calls.compare([o.to(torch.float64) for o in meshes[:1]] if name == "dtype" else meshes[:1])
    assert before > 0
    if name == "forward of a submodule":  # the function reads the parameters of the network itself
        (warning,) = caught
        assert "not as its parameter" in str(warning.message)
    else:
        assert caught == []
        assert len(replays) > before


@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_on_all_modules_is_called(meshes: list[Operators], device: str) -> None:
    calls, seen = Calls(changing(), device), []
    operators = meshes[0].to(device)
    for each in calls.each():
        each.shift = each.shift.to(device)
    calls.compare([operators])
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module))):
        with pytest.warns(RuntimeWarning, match="a module has hooks"):
            found = results(calls.model, operators)
        times = len(seen)
        assert_same(found, results(calls.plain, operators))
        assert len(seen) == 2 * times > 4
    calls.compare([operators])


def test_a_number_that_changes_in_every_call_is_named_once(meshes: list[Operators]) -> None:
    calls = Calls(changing(), "cpu")

    def train() -> None:
        for i in range(2 * MAX_NEW_STATES):
            for each in calls.each():
                each.scale = 1.0 + i
            calls.compare(meshes[:1], times=1)

    with pytest.warns(RuntimeWarning, match="the attribute 'scale' changes in almost every call") as caught:
        train()
    assert len(caught) == 1


def test_copies_have_a_forward_of_their_own(meshes: list[Operators]) -> None:
    calls = Calls(small(), "cpu")
    operators = meshes[0]
    calls.compare([operators])
    for copied in (copy.copy(calls.model), calls.model._replicate_for_data_parallel()):
        copied.last_activation = torch.tanh
        assert_same(results(copied, operators)[:1], [results(calls.plain, operators)[0].tanh()])
    calls.compare([operators])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first_visits", [0, 1])
def test_one_thread_evaluates_while_another_trains(meshes: list[Operators], device: str, first_visits: int) -> None:
    plain = small().to(device)
    batches = [o.to(device) for o in meshes]
    expected = [results(plain, o) for o in batches]
    for _ in range(2):
        model = with_graphs(plain, device, first_visits)
        errors: list[BaseException] = []
        done = threading.Event()

        def evaluate(model: nn.Module = model, errors: list[BaseException] = errors, done: Any = done) -> None:
            try:
                while not done.is_set():
                    for o, values in zip(batches, expected, strict=True):
                        x = torch.randn(o.num_vertices, 3, generator=torch.Generator().manual_seed(1)).to(device)
                        with torch.no_grad():
                            assert_same([model(x, o)], values[:1])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for _ in range(4):
                for o, values in zip(batches, expected, strict=True):
                    assert_same(results(model, o), values)
        finally:
            done.set()
            thread.join()
        assert errors == []


def test_probing_leaves_everything_as_one_step_does(meshes: list[Operators]) -> None:
    """The network is refused, so the first call with graphs is one without."""

    def make() -> nn.Module:
        return Foreign(lambda m, y, x, o: F.dropout(m.norm(y), 0.5) * random.random(), norm=nn.BatchNorm1d(5))

    calls, states = Calls(make(), "cpu", first_visits=0), []
    for each in calls.each():
        torch.manual_seed(3), random.seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = results(each, meshes[0])
        states.append([*found, torch.get_rng_state()])
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a is b for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_of_users_is_the_same_on_buffers(meshes: list[Operators], p: float, replays: list[int]) -> None:
    model = with_graphs(Foreign(lambda m, y, x, o: F.dropout(y, p) * torch.rand_like(y).exp()), first_visits=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            first = results(model, meshes[0])[0]
    assert not torch.equal(first, results(model, meshes[0])[0])
    assert replays


def test_joined_vertices_are_seen_on_graphs(replays: list[int]) -> None:
    sphere = trimesh.creation.icosphere(1)
    corners = sphere.vertices[sphere.faces].reshape(-1, 3), np.arange(3 * len(sphere.faces)).reshape(-1, 3)
    soup = precompute(corners, k=6)
    assert soup.joined is not None
    calls = Calls(Foreign(lambda m, y, x, o: y[o.joined] + o.joined[:, None] / 100), "cpu")
    calls.compare([soup])
    assert replays
