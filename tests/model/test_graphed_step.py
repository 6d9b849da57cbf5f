"""`GraphedStep` trains as a loop of PyTorch does. Without a GPU, graphs are emulated."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import DEVICES, EmulatedGraph, ReplayedGraph, counted_replays, network, two_groups
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import GraphedStep, Operators, WeightAverage, collate, graphed, label_smoothing_loss, precompute
from diffnet.cuda_graphs import optimizers, sizes as graph_sizes
from diffnet.cuda_graphs.whole_step import StepGraphs
from diffnet.train.steps.step import Adam

CLASSES = 5
Batch = tuple[Tensor, Operators, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
# With a small ε, Adam would take rounding errors of vanishing gradients for gradients.
ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-4)


def batches(meshes: list[Operators], device: str = "cpu", rounds: int = 3) -> list[Batch]:
    torch.manual_seed(1)
    found = []
    for o in meshes * rounds:
        labels = torch.randint(CLASSES, (o.num_vertices,))
        found.append((torch.randn(o.num_vertices, 3).to(device), o.to(device), labels.to(device)))
    return found


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, data: list[Batch], clip: float = 0) -> Tensor:
    """The losses of a loop as users write it."""
    found = []
    for x, o, y in data:
        optimizer.zero_grad()
        value = loss(model(x, o), y).mean()
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(value.detach())
    return torch.stack(found)


def made(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, recorder: Any = ReplayedGraph, **options: Any
) -> GraphedStep:
    step = GraphedStep(model, optimizer, loss, **options)
    if next(model.parameters()).device.type == "cpu":
        step.recorder = recorder
    return step


def assert_same(
    data: list[Batch],
    loss: Any = F.cross_entropy,
    optimizer: Optimizer = ADAM,
    model: nn.Module | None = None,
    replays: int | None = None,
    clip: float = 0,
    **options: Any,
) -> GraphedStep:
    """Train two copies of a model, by a loop and by `GraphedStep`, and compare losses and weights.

    replays: the number of graphs that are replayed on the CPU
    """
    device = data[0][0].device
    plain = (network() if model is None else model).to(device)
    other = copy.deepcopy(plain)
    expected = loop(plain, optimizer(plain.parameters()), loss, data, clip)
    step = made(other, optimizer(other.parameters()), loss, clip=clip, **options)
    before = EmulatedGraph.replays
    found = torch.stack([step(*batch) for batch in data])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(list(other.parameters()), list(plain.parameters()), rtol=1e-3, atol=1e-4)
    if replays is not None and device.type == "cpu":
        assert EmulatedGraph.replays - before == replays
    assert all(p.grad is None for p in other.parameters())
    assert not found.requires_grad
    return step


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("at", ["faces", "edges", "global_mean"])
def test_outputs_elsewhere(meshes: list[Operators], at: Any) -> None:
    rows = {"faces": lambda o: len(o.faces), "edges": lambda o: len(o.edges), "global_mean": len}[at]
    data = [(x, o, torch.arange(rows(o)) % CLASSES) for x, o, _ in batches(meshes)]
    assert_same(data, model=network(outputs_at=at), replays=6)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
def test_learning_rates_of_groups(meshes: list[Operators], device: str) -> None:
    """Steps leave the groups as the user wrote them, and read a rate that is a tensor, which changes in place."""
    data = batches(meshes[:1], device, 4)
    model, other = network().to(device), network().to(device)
    optimizer, rate = two_groups(model.parameters()), torch.tensor(0.0, device=device)
    step = made(model, optimizer, F.cross_entropy)
    rated = made(other, torch.optim.Adam(other.parameters(), lr=rate, fused=True), F.cross_entropy)
    for batch in data:
        step(*batch), rated(*batch)
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
    assert optimizer.param_groups[0]["fused"] is None
    assert not optimizer.param_groups[0]["capturable"]
    before = list(network().to(device).parameters())
    torch.testing.assert_close(list(other.parameters()), before)
    rate.fill_(1e-2)
    rated(*data[0])
    assert not torch.equal(before[0], next(other.parameters()))


@pytest.mark.usefixtures("no_warning")
def test_batches_in_which_nothing_counts_and_networks_with_graphs(meshes: list[Operators]) -> None:
    assert_same(batches(meshes), model=graphed(network()), replays=6)
    (x, o, y), *others = batches(meshes)
    data = [(x, o, torch.full_like(y, -1)), *others]
    assert_same(data, label_smoothing_loss, recorder=EmulatedGraph, replays=6)


def test_a_loop_goes_on_after_steps(meshes: list[Operators]) -> None:
    """The optimizer and its stored state serve an ordinary loop, also one on other steps."""
    data = batches(meshes)
    model, other = network(), network()
    optimizer, own = (ADAM(m.parameters()) for m in (model, other))
    step = made(model, optimizer, F.cross_entropy)
    for x, o, y in data:
        F.cross_entropy(model(x, o), y).backward()  # gradients from before a step don't count
        step(x, o, y)
        assert all(p.grad is None for p in model.parameters())
    loop(other, own, F.cross_entropy, data)
    torch.testing.assert_close(
        loop(model, optimizer, F.cross_entropy, data), loop(other, own, F.cross_entropy, data), rtol=1e-3, atol=1e-4
    )
    assert optimizer.state_dict()["param_groups"] == own.state_dict()["param_groups"]


def test_an_error_of_the_loss_leaves_the_step_usable(meshes: list[Operators]) -> None:
    fails = True

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails:
            raise KeyError("no such class")
        return F.cross_entropy(outputs, targets)

    model = network()
    step = made(model, ADAM(model.parameters()), loss)
    data = batches(meshes)
    refused(KeyError, "no such class", step, *data[0])
    assert torch.equal(next(model.parameters()), next(network().parameters()))
    fails = False
    assert counted_replays(lambda: [step(*batch) for batch in data]) == 14  # of two passes
    with pytest.raises(ValueError, match=r"a number or 12 rows for 12 rows, got shape \(60,\)"):
        made(model, torch.optim.Adam(model.parameters()), lambda out, y: out.flatten())(*data[0])
    with pytest.raises(TypeError, match="the loss should return a tensor, got float"):
        made(model, torch.optim.Adam(model.parameters()), lambda out, y: 1.0)(*data[0])


class Shifted(nn.Module):
    """A network with an argument for each mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, o: Operators, shift: Tensor) -> Tensor:
        return self.net(x + shift.repeat_interleave(o.ptr.diff(), 0, output_size=len(x)), o)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [Shifted, partial(network, condition_channels=3, global_tokens=2)])
def test_averaged_weights_and_arguments_of_meshes(meshes: list[Operators], device: str, make: Any) -> None:
    data = [(*batch, torch.randn(1, 3).to(device)) for batch in batches(meshes, device)]
    found = []
    for graphs in (False, True):
        model = make().to(device)
        average = WeightAverage(model, 0.5)
        step = made(model, ADAM(model.parameters()), F.cross_entropy, average=average)
        step.graphs = graphs
        losses = torch.stack([step(*batch) for batch in data])
        average.write()
        found.append((losses, list(average.network.parameters())))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-4)


SEVERAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "a number": (partial(F.cross_entropy, ignore_index=-1), {}),
    "rows": (partial(F.cross_entropy, reduction="none", ignore_index=-1), {}),
    "class weights": (nn.CrossEntropyLoss(1.0 + torch.arange(CLASSES), ignore_index=-1), {}),
    "a function of the user": (lambda out, y: F.cross_entropy(out, y, ignore_index=-1), {"ignore_index": -1}),
    "weights of the user": (
        lambda out, y: F.cross_entropy(out, y, 1.0 + torch.arange(CLASSES), ignore_index=-1),
        {"weight": lambda targets: torch.where(targets < 0, 0, 1 + targets).sum().float()},
    ),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_batches_are_one_step(meshes: list[Operators], case: str) -> None:
    """As one batch with all of their meshes, also where two processes share them, and one of these has none."""
    loss, options = SEVERAL[case]
    data = batches(meshes, rounds=4)
    for i, (_, o, y) in enumerate(data):
        y[: o.num_vertices * (i % 3) // 2] = -1  # nothing counts in every third
    parts = [data[:3], data[3:5], data[5:9], data[9:]]
    whole = [
        (torch.cat([x for x, _, _ in part]), collate([o for _, o, _ in part]), torch.cat([y for _, _, y in part]))
        for part in parts
    ]
    plain = network()
    models = [copy.deepcopy(plain) for _ in range(3)]
    expected = loop(plain, ADAM(plain.parameters()), loss, whole, clip=2.0)
    alone, *both = (made(m, ADAM(m.parameters()), loss, clip=2.0, **options) for m in models)

    def trained() -> None:
        for part, value in zip(parts, expected, strict=True):
            for batch in part:
                alone.add(*batch)
            torch.testing.assert_close(alone.update(), value, rtol=1e-4, atol=1e-5)
            first, second = both
            for batch in part[:-1]:
                first.add(*batch)
            if len(part) > 3:
                second.add(*part[-1])
            else:
                first.add(*part[-1])
            total = first._plain.sums() + second._plain.sums()  # what all_reduce would give to both
            values = [step.update(lambda sums: sums.copy_(total)) for step in both]  # noqa: B023
            assert values[0] == values[1]

    assert counted_replays(trained) > 10
    for model in models:
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            assert a.grad is None
    before = copy.deepcopy(models[0].state_dict())
    alone.add(*data[0][:2], torch.full_like(data[0][2], -1))
    assert alone.update() == 0
    for a, b in zip(models[0].state_dict().values(), before.values(), strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() < 0.1  # the moments of Adam are left


class Flagged(nn.Module):
    """A network with a layer that no batch reaches, and one that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused, self.extra = network(), nn.Linear(2, 2), nn.Linear(3, CLASSES, bias=False)

    def forward(self, x: Tensor, o: Operators) -> Tensor:
        out: Tensor = self.net(x, o)
        return out + self.extra(x) if x[:, 0].any() else out


@pytest.mark.filterwarnings("ignore:training runs without CUDA graphs")
@pytest.mark.parametrize("graphs", [False, True])
def test_parameters_that_no_batch_reaches_stay(meshes: list[Operators], graphs: bool) -> None:
    """Weight decay and momenta change them in no process, whichever of these reaches them."""
    data = [(x.double(), o.to(torch.float64), y) for x, o, y in batches(meshes, rounds=4)]
    for i, (x, _, _) in enumerate(data):
        if i % 4 != 1:
            x.zero_()
    models = [Flagged().double() for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-4, weight_decay=0.5) for m in models]
    _, alone, *both = (made(m, o, F.cross_entropy, clip=1.0) for m, o in zip(models, optimizers, strict=True))
    for step in (alone, *both):
        step.graphs = graphs
    for i in range(0, 12, 2):
        parts = data[i : i + 2]
        xs, os, ys = zip(*parts, strict=True)
        loop(models[0], optimizers[0], F.cross_entropy, [(torch.cat(xs), collate(list(os)), torch.cat(ys))], clip=1.0)
        for step, batch in zip(both, parts, strict=True):
            alone.add(*batch)
            step.add(*batch)
        total = both[0]._plain.sums() + both[1]._plain.sums()  # what all_reduce would give to both
        for step in (alone, *both):
            step.update(None if step is alone else lambda sums: sums.copy_(total))  # noqa: B023
    for model in models[1:]:
        for a, b in zip(model.parameters(), models[0].parameters(), strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm()


def test_batches_count_what_their_losses_divide_by(meshes: list[Operators]) -> None:
    """Changes between `add` and `update` lose no batch, and a loss that doesn't say what it divides by is refused."""
    (x, o, y), (x2, o2, y2) = batches(meshes)[1:3]
    y[:20], y2[:100] = 255, 255
    plain, model = network(), network()
    loss = nn.CrossEntropyLoss(ignore_index=255)
    whole = torch.cat([x, x2]), collate([o, o2]), torch.cat([y, y2])
    expected = loop(plain, ADAM(plain.parameters()), loss, [whole])
    step = made(model, ADAM(model.parameters()), loss)
    step.add(x, o, y)
    model.first.requires_grad_(False)
    step.add(x2, o2, y2)
    model.first.requires_grad_(True)
    torch.testing.assert_close(step.update(), expected[0])
    torch.testing.assert_close(model.last.weight, plain.last.weight)
    assert not torch.equal(model.first.weight, network().first.weight)
    for unclear in (
        nn.CrossEntropyLoss(reduction="sum"),
        lambda out, y: F.cross_entropy(out, y, ignore_index=255).reshape(1),
    ):
        with pytest.raises(ValueError, match="pass weight= or ignore_index= to GraphedStep"):
            made(network(), ADAM(plain.parameters()), unclear).add(x, o, y)
    step.add(x, o, y)
    step._plain.optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})  # the user's optimizer
    refused(RuntimeError, "parameters have been replaced or moved between `add` and `update`", step.update)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_copies_of_a_step_go_on_alike(meshes: list[Operators], copied: Callable[[Any], Any]) -> None:
    data = batches(meshes)
    model = network()
    step = made(model, ADAM(model.parameters()), F.cross_entropy, average=WeightAverage(model, 0.9))
    step.reserve(meshes)
    for batch in data:
        step(*batch)
    step.add(*data[0])
    other = copied(step)
    for each in (step, other):
        each.add(*data[1])
    torch.testing.assert_close(other.update(), step.update())
    torch.testing.assert_close(other(*data[2]), step(*data[2]))


@pytest.mark.parametrize("recorder", [EmulatedGraph, ReplayedGraph])
def test_packed_batches_whose_division_changes(meshes: list[Operators], recorder: Any) -> None:
    """All have 108 vertices and share a graph. Sizes that are read back can't be recorded."""
    a, b, _ = (o.to(torch.float64) for o in meshes)
    packs = [collate(pack) for pack in ([a, b, b, a], [b, a, a, b], [b, b, a, a], [a, a, b, b])] * 3
    data = [(torch.randn(o.num_vertices, 3).double(), o, torch.randint(CLASSES, (o.num_vertices,))) for o in packs]
    plain = network().double()
    other, network_alone = copy.deepcopy(plain), copy.deepcopy(plain)
    expected = loop(plain, ADAM(plain.parameters()), F.cross_entropy, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = made(other, ADAM(other.parameters()), F.cross_entropy, recorder)
        before = EmulatedGraph.replays
        torch.testing.assert_close(torch.stack([step(*batch) for batch in data]), expected, rtol=1e-9, atol=0)
        assert EmulatedGraph.replays - before == (11 if recorder is EmulatedGraph else 0)
        step = made(network_alone, ADAM(network_alone.parameters()), lambda out, y: F.cross_entropy(out, y), recorder)
        torch.testing.assert_close(torch.stack([step(*batch) for batch in data]), expected, rtol=1e-9, atol=0)
    assert len(caught) == (0 if recorder is EmulatedGraph else 2)


def test_wrapped_networks_that_exchange_gradients(meshes: list[Operators], tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.parallel.DistributedDataParallel(network())

        def forward(self, x: Tensor, o: Operators) -> Tensor:
            return self.inner(x, o)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for loss in (F.cross_entropy, lambda out, y: F.cross_entropy(out, y)):
            with pytest.warns(RuntimeWarning, match="DistributedDataParallel exchanges gradients"):
                assert_same(batches(meshes), loss, model=Wrapper(), replays=0)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_updates_are_recorded(meshes: list[Operators], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is, and gives the bits of one that is not, also after changes of rate, state and mode."""
    batch = batches(meshes, device)[0]
    found = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(StepGraphs, "update", lambda self, with_others: None)
        model = network().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        step = made(model, optimizer, F.cross_entropy, clip=1.0, average=WeightAverage(model, 0.9))

        def trained(count: int, step: GraphedStep = step) -> list[Tensor]:
            losses = []
            for _ in range(count):
                step.add(*batch)
                losses.append(step.update(lambda sums: sums.mul_(2)))
            return losses

        before = EmulatedGraph.replays
        losses = trained(4)
        assert device == "cuda" or EmulatedGraph.replays - before == (6 if recorded else 3)
        optimizer.param_groups[0]["lr"] = 1e-2
        losses += trained(2)
        optimizer.load_state_dict(optimizer.state_dict())
        losses += trained(3)
        model.eval()
        losses += trained(3)
        assert all(p.grad is None for p in model.parameters())
        found.append([torch.stack(losses), *model.parameters()])
    assert all(map(torch.equal, *found))


def test_announced_meshes_are_recorded_once(meshes: list[Operators]) -> None:
    for announced, expected in ((False, 6), (True, 7)):
        model = network()
        step = made(model, torch.optim.Adam(model.parameters()), F.cross_entropy)
        if announced:
            step.reserve(meshes, batch_meshes=1)
        data = batches(meshes)
        assert counted_replays(lambda: [step(*batch) for batch in data]) == expected  # noqa: B023
        step.reset()
        assert counted_replays(lambda: [step(*batch) for batch in data]) == expected  # noqa: B023


def test_large_batches_run_without_graphs(meshes: list[Operators], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of half the limit have graphs, also if all announced meshes are too large for them."""
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", 100 * 6 * 4)
    assert_same(batches(meshes, rounds=4), replays=6)
    model = network()
    step = made(model, torch.optim.Adam(model.parameters()), F.cross_entropy)
    step.reserve(meshes[2:], batch_meshes=2, batch_vertices=200)
    assert counted_replays(lambda: [step(*batch) for batch in batches(meshes)]) == 5  # of 12 and 42 vertices


def test_steps_on_the_cpu_are_those_of_a_loop(meshes: list[Operators]) -> None:
    data = batches(meshes)
    plain, other = network(dropout=0.5), network(dropout=0.5)
    torch.manual_seed(2)
    expected = loop(plain, torch.optim.Adam(plain.parameters()), F.cross_entropy, data)
    step = GraphedStep(other, torch.optim.Adam(other.parameters()), F.cross_entropy)
    torch.manual_seed(2)
    assert torch.equal(torch.stack([step(*batch) for batch in data]), expected)


def test_bad_arguments() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for arguments, error, message in (
        ((F.relu, optimizer, F.cross_entropy), TypeError, "model should be a module such as DiffusionNet, got "),
        ((model, 1e-3, F.cross_entropy), TypeError, "optimizer should be one of torch.optim, got float"),
        ((model, optimizer, "mse"), TypeError, "loss should be a function of outputs and targets, got str"),
    ):
        refused(error, message, GraphedStep, *arguments)
    with pytest.raises(ValueError, match="clip should be a finite number of at least 0, got -1"):
        GraphedStep(model, optimizer, F.cross_entropy, clip=-1)
    with pytest.raises(ValueError, match=r"outputs_at should be one of vertices, .*, pairs, got 'face'"):
        GraphedStep(model, optimizer, F.cross_entropy, outputs_at="face")
    refused(ValueError, "decay should be above 0 and below 1, got 1", WeightAverage, model, 1)


@pytest.mark.parametrize(
    ("change", "fault"),
    {
        "replaced": (lambda model: setattr(model, "last", nn.Linear(8, 4)), r"^last\.weight was replaced"),
        "inside": (lambda model: setattr(model.blocks[0].mlp, "2", nn.Linear(8, 8)), r"^blocks\.0\.mlp\.2\.weight was"),
        "added": (lambda model: model.blocks.append(nn.Linear(8, 8)), r"^blocks\.1\.weight was replaced, added"),
        "moved": (lambda model: model.double(), "is now torch.float64 on cpu"),
    }.values(),
)
def test_an_average_belongs_to_the_parameters_that_it_was_made_of(change: Callable[[Any], object], fault: str) -> None:
    model = network()
    average = WeightAverage(model, 0.9)
    average.update()
    model.blocks[0].mlp.dropout = nn.Dropout(0.1)  # no parameter
    model.first.requires_grad_(False)
    average.update()
    average.write()
    assert torch.equal(average.network.first.weight, model.first.weight)  # not rounded
    change(model)
    for work in (average.update, average.write):
        refused(RuntimeError, fault, work)


class Signed(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors of the updates by the kernel. On the CPU, it is used, too."""
    kernels = pytest.importorskip("diffnet.ops.adam.kernels", reason="Triton is missing")
    found: list[int] = []
    update = kernels.adam

    def counted(tensors: Any, *arguments: Any) -> None:
        found.append(len(tensors.parameters))
        update(tensors, *arguments)

    monkeypatch.setattr(kernels, "adam", counted)
    return found


def chosen(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    monkeypatch.setattr(optimizers, "use_kernels", lambda *arguments: kernel)


class Run:
    def __init__(self, optimizer: Optimizer, device: str) -> None:
        self.operators = precompute(trimesh.creation.icosphere(1), k=6).to(device)
        self.model = network().to(device)
        self.average = WeightAverage(self.model, 0.9)
        self.optimizer = optimizer(self.model)
        self.step = GraphedStep(self.model, self.optimizer, F.cross_entropy, clip=1.0, average=self.average)
        if device == "cpu":
            self.step.recorder = EmulatedGraph

    def train(self, steps: int) -> None:
        torch.manual_seed(1)
        device = self.operators.ptr.device
        for _ in range(steps):
            x, y = torch.randn(42, 3).to(device), torch.randint(5, (42,)).to(device)
            self.step(x, self.operators, y)

    def tensors(self) -> list[list[Any]]:
        states = self.optimizer.state_dict()["state"].values()
        names = ("step", "exp_avg", "exp_avg_sq")
        assert all(set(names) <= state.keys() for state in states)
        return [
            list(self.model.state_dict().values()),
            list(self.average.averages.values()),
            *([state[name] for state in states] for name in names),
        ]


def whole(kind: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    # With a small ε, Adam would take rounding errors of vanishing gradients for gradients.
    return lambda model: kind(model.parameters(), **{"lr": 1e-2, "eps": 1e-4, **options})


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which the kernel takes one."""
    biases = [p for p in model.parameters() if p.ndim < 2]
    others = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "amsgrad": True}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        whole(torch.optim.Adam),
        whole(torch.optim.Adam, weight_decay=0.1),
        whole(torch.optim.AdamW, weight_decay=0.1, capturable=True),
        whole(Adam, fused=True),
        grouped,
    ],
    ids=["Adam", "decay", "AdamW", "train", "groups"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_adam(optimizer: Optimizer, device: str, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights, their average and the state are those of PyTorch, also after they are saved and loaded."""
    chosen(monkeypatch, False)
    expected = Run(optimizer, device)
    expected.train(3)
    expected.train(3)
    assert not launches
    chosen(monkeypatch, True)
    run, resumed = Run(optimizer, device), Run(optimizer, device)
    run.train(3)
    assert len(set(launches)) == 1  # of as many tensors in each step
    state, average = copy.deepcopy((run.optimizer.state_dict(), run.average.state_dict()))
    resumed.optimizer.load_state_dict(state)
    resumed.average.load_state_dict(average)
    for each in (run, resumed):
        each.train(3)
        torch.testing.assert_close(each.tensors(), expected.tensors(), rtol=1e-4, atol=1e-6)
    for found, again in zip(run.tensors(), resumed.tensors(), strict=True):
        assert all(map(torch.equal, found, again))


@pytest.mark.parametrize(
    "optimizer",
    [
        whole(torch.optim.Adam, amsgrad=True),
        whole(torch.optim.Adam, maximize=True),
        whole(torch.optim.Adam, foreach=False),
        whole(torch.optim.Adam, fused=False),
        whole(Signed),
        whole(torch.optim.NAdam),
        lambda model: torch.optim.Adam(model.double().parameters()),
    ],
    ids=["amsgrad", "maximize", "foreach", "not fused", "subclass", "NAdam", "float64"],
)
def test_other_optimizers(optimizer: Optimizer, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(monkeypatch, True)
    found = []
    for captured in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p)
        made = optimizer(model)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        step = partial(optimizers.CapturedOptimizer(made).step, torch.device("cpu")) if captured else made.step
        step()
        found.append(list(model.parameters()))
    assert not launches
    torch.testing.assert_close(found[0], found[1])


def test_schedulers_notice_steps(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch warns if a scheduler's first step comes before that of its optimizer."""
    chosen(monkeypatch, True)
    run = Run(whole(torch.optim.Adam), "cpu")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(1)
        scheduler.step()
    assert launches


@pytest.mark.gpu
def test_packed_batches_under_autocast_on_a_gpu(meshes: list[Operators]) -> None:
    """Batches of several meshes, with dropout that is off, in bf16."""
    packed = [*meshes, collate(meshes), collate([meshes[2], meshes[1]])]
    with torch.autocast("cuda", torch.bfloat16):
        found = []
        for graphs in (False, True):
            model = network().cuda()
            step = GraphedStep(model, torch.optim.Adam(model.parameters(), lr=1e-3), F.cross_entropy)
            step.graphs = graphs
            found.append(torch.stack([step(*batch) for batch in batches(packed, "cuda")]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_steps_wait_for_nothing_on_a_gpu(meshes: list[Operators]) -> None:
    model = network(dropout=0.5).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    step = GraphedStep(model, optimizer, partial(F.cross_entropy, reduction="none"), clip=1.0)
    data = batches(meshes, "cuda")
    for batch in data:
        step(*batch)
        step.add(*batch)
        step.update()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step(*data[-1]) for _ in range(3)]
        scheduler.step()
        step(*data[-1])
        step.add(*data[-1])
        step.add(*data[-1])
        step.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({float(x) for x in losses}) == 3
