"""`GraphedStep` trains as a loop of PyTorch does. Without a GPU, graphs are emulated."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import EmulatedGraph, ReplayedGraph
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import (
    DiffusionNet,
    GraphedStep,
    Operators,
    WeightAverage,
    collate,
    graphed,
    label_smoothing_loss,
    precompute,
)
from diffnet.cuda_graphs import sizes as graph_sizes
from diffnet.cuda_graphs.module_state import MAX_NEW_STATES
from diffnet.cuda_graphs.whole_step import StepGraphs

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
CLASSES = 5
Batch = tuple[Tensor, Operators, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
# With a small ε, Adam would take rounding errors of vanishing gradients for gradients.
ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-4)


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """Spheres of 12, 42 and 162 vertices."""
    return [precompute(trimesh.creation.icosphere(i), k=6) for i in range(3)]


def network(**options: Any) -> DiffusionNet:
    torch.manual_seed(0)
    return DiffusionNet(3, CLASSES, **{"width": 8, "blocks": 1, "dropout": 0.0, "gradient": "spectral", **options})


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


def replays_of(call: Callable[[], Any]) -> int:
    before = EmulatedGraph.replays
    call()
    return EmulatedGraph.replays - before


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
    for a, b in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
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


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "lr": 1e-3, "weight_decay": 0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": ADAM,
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, amsgrad=True),
    "fused Adam": partial(ADAM, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "two groups": two_groups,
}


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [0, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_train_as_a_loop_does(meshes: list[Operators], optimizer: str, clip: float, device: str) -> None:
    # 12 and 42 vertices share buffers. Buffers of the first size are dropped for those of 162 vertices.
    assert_same(batches(meshes, device), optimizer=OPTIMIZERS[optimizer], clip=clip, replays=6)


class Weighted(nn.Module):
    """A loss with parameters, which are not trained, and with a count of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(CLASSES))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.rows += (targets >= 0).sum()
        return F.cross_entropy(outputs, targets, self.weights.detach())


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, None]).square()


def without_missing(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the targets that are not NaN."""
    known = ~targets.isnan()
    errors = torch.where(known, outputs[:, 0] - targets.nan_to_num(), 0).square()
    return errors.sum() / known.sum()


LOSSES: dict[str, Any] = {
    "PyTorch's": F.cross_entropy,
    "diffnet's": partial(label_smoothing_loss, smoothing=0.1),
    "ignoring -1": partial(F.cross_entropy, ignore_index=-1, label_smoothing=0.1),
    "module": nn.CrossEntropyLoss(),
    "of rows": partial(F.cross_entropy, reduction="none"),
    "of several columns": squares,
}


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(meshes: list[Operators], loss: str, device: str) -> None:
    # On the CPU, diffnet's loss reads labels to check them.
    recorder = EmulatedGraph if loss == "diffnet's" else ReplayedGraph
    assert_same(batches(meshes, device), LOSSES[loss], recorder=recorder, replays=6)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_a_module_may_count(meshes: list[Operators], device: str) -> None:
    data = batches(meshes, device)
    loss = Weighted().to(device)
    model = network().to(device)
    step = made(model, ADAM(model.parameters()), loss)
    for batch in data:
        step(*batch)
    assert int(loss.rows) == sum(len(y) for _, _, y in data)


@pytest.mark.usefixtures("no_warning")
def test_targets_that_are_numbers(meshes: list[Operators]) -> None:
    data = [(x, o, y.float() / 4) for x, o, y in batches(meshes)]
    assert_same(data, without_missing, replays=6)
    assert_same(data, lambda out, y: (out[:, 0] - y).abs(), replays=6)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("at", ["faces", "edges", "global_mean"])
def test_outputs_elsewhere(meshes: list[Operators], at: Any) -> None:
    rows = {"faces": lambda o: len(o.faces), "edges": lambda o: len(o.edges), "global_mean": len}[at]
    data = [(x, o, torch.arange(rows(o)) % CLASSES) for x, o, _ in batches(meshes)]
    assert_same(data, model=network(outputs_at=at), replays=6)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
def test_learning_rates_that_change(meshes: list[Operators], device: str) -> None:
    """By a scheduler, by hand, and in place if the rate is a tensor."""
    data = batches(meshes[:1], device, 8)
    for scheduled in (True, False):
        found = []
        for graphs in (False, True):
            model = network().to(device)
            optimizer = two_groups(model.parameters())
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8) if scheduled else None
            step = made(model, optimizer, F.cross_entropy)
            for i, batch in enumerate(data):
                if graphs:
                    step(*batch)
                else:
                    loop(model, optimizer, F.cross_entropy, [batch])
                if scheduler is not None:
                    scheduler.step()
                elif i == 4:
                    optimizer.param_groups[1]["lr"] = 1e-4
            found.append([p.detach() for p in model.parameters()])
            # The groups are as the user wrote them.
            assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
            assert optimizer.param_groups[0]["fused"] is None
            assert not optimizer.param_groups[0]["capturable"]
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    model = network().to(device)
    rate = torch.tensor(0.0, device=device)
    step = made(model, torch.optim.Adam(model.parameters(), lr=rate, fused=True), F.cross_entropy)
    for batch in data[:3]:
        step(*batch)
    before = copy.deepcopy(list(model.parameters()))
    torch.testing.assert_close(before, list(network().to(device).parameters()))
    rate.fill_(1e-2)
    step(*data[0])
    assert not torch.equal(before[0], next(model.parameters()))


class Noisy(nn.Module):
    """A network with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = network(), nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor, o: Operators) -> Tensor:
        return self.norm(self.net(x, o))


def hooked() -> nn.Module:
    model = network()
    model.last.register_forward_hook(lambda *_: None)
    return model


def reads_back(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    assert loss.item() >= 0
    return loss


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mean over rows": (
        {"loss": lambda out, y: squares(out, y).mean()},
        r"the loss doesn't ignore rows that are added to a batch with the target -1 \(the value changes\) or -100",
    ),
    "label out of range": (
        {"loss": partial(F.cross_entropy, ignore_index=255)},
        r"the target -1 \(IndexError: Target -1 is out of bounds.\).*pass the ignored label as ignore_index",
    ),
    "wrong label": ({"ignore_index": 3}, r"with the target 3 \(the value changes\)"),
    "rows that depend": (
        {"loss": lambda out, y: F.cross_entropy(out - out.mean(0), y, reduction="none")},
        "the loss of a row depends on rows that are added to a batch",
    ),
    "other rows": ({"loss": lambda out, y: squares(out, y).flatten()}, "should return a number or 12 rows for 12 rows"),
    "value read back": ({"loss": reads_back}, r"it can't be recorded \(.*capturing; .* as by .item\(\)\)"),
    "batch statistics": ({"model": Noisy}, "rows that are added to a batch change the output"),
    "hooks": ({"model": hooked}, "a module has hooks"),
    "optimizer without the option": ({"optimizer": partial(torch.optim.Adagrad, lr=1e-2)}, "Adagrad has no option"),
    "optimizer with hooks": ({"optimizer": with_hook}, "Adam has hooks"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", REFUSED)
def test_steps_without_graphs_say_why_once(meshes: list[Operators], case: str, device: str) -> None:
    given, reason = REFUSED[case]
    given = {name: value() if name == "model" else value for name, value in given.items()}
    with pytest.warns(RuntimeWarning, match=f"training runs without CUDA graphs: .*{reason}") as caught:
        assert_same(batches(meshes[:2], device, 2), replays=0, **given)
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("no_warning")
def test_another_ignored_label(meshes: list[Operators]) -> None:
    loss = partial(F.cross_entropy, ignore_index=255)
    assert_same(batches(meshes), loss, ignore_index=255, replays=6)


@pytest.mark.usefixtures("no_warning")
def test_batches_in_which_nothing_counts(meshes: list[Operators]) -> None:
    (x, o, y), *others = batches(meshes)
    data = [(x, o, torch.full_like(y, -1)), *others]
    assert_same(data, label_smoothing_loss, recorder=EmulatedGraph, replays=5)


def test_options_that_change_in_every_step(meshes: list[Operators]) -> None:
    model = network()
    optimizer = ADAM(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    step = made(model, optimizer, F.cross_entropy)
    data = batches(meshes[:1], rounds=MAX_NEW_STATES + 4)

    def train() -> None:
        for batch in data:
            step(*batch)
            scheduler.step()

    with pytest.warns(RuntimeWarning, match="as OneCycleLR changes betas"):
        train()
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    assert replays_of(lambda: [step(*data[0]) for _ in range(4)]) == 2


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_what_changes_between_steps_counts(meshes: list[Operators], name: str, device: str) -> None:
    """Modes, frozen parameters, replaced layers, loaded weights, and a stored optimizer."""
    data = batches(meshes[:2], device, 1)
    found = []
    for graphs in (False, True):
        model = network(dropout=0.5).eval().to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        step = made(model, optimizer, F.cross_entropy)

        def run() -> Tensor:
            if graphs:  # noqa: B023
                return torch.stack([step(*batch) for batch in data * 2])  # noqa: B023
            return loop(model, optimizer, F.cross_entropy, data * 2)  # noqa: B023

        model.last.requires_grad_(False)
        losses = [run()]
        model.last.requires_grad_(True)
        first, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.first.requires_grad_(False)
        losses.append(run())
        model.first.requires_grad_(True)
        losses.append(run())
        optimizer.load_state_dict(state)
        model.load_state_dict(first)
        losses.append(run())
        model.last_activation = torch.sigmoid
        losses.append(run())
        optimizer.param_groups[0]["weight_decay"] = 0.1
        losses.append(run())
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, device=device))]})
        losses.append(run())
        found.append((torch.cat(losses), [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


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


class Unused(nn.Module):
    """A network with a parameter that gets no gradient, one that is frozen, and one that its forward pass ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.net.recompute_activations = True
        self.unused = nn.Linear(2, 2)
        self.net.first.bias.requires_grad_(False)

    def forward(self, x: Tensor, o: Operators) -> Tensor:
        return self.net(x, o)


@pytest.mark.usefixtures("no_warning")
def test_parameters_without_gradients_and_recomputed_activations(meshes: list[Operators]) -> None:
    assert_same(batches(meshes), model=Unused(), replays=6)


@pytest.mark.usefixtures("no_warning")
def test_networks_with_graphs_of_their_own(meshes: list[Operators]) -> None:
    assert_same(batches(meshes), model=graphed(network()), replays=6)


def test_an_error_of_the_loss_leaves_the_step_usable(meshes: list[Operators]) -> None:
    fails = True

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails:
            raise KeyError("no such class")
        return F.cross_entropy(outputs, targets)

    model = network()
    step = made(model, ADAM(model.parameters()), loss)
    data = batches(meshes)
    with pytest.raises(KeyError, match="no such class"):
        step(*data[0])
    assert torch.equal(next(model.parameters()), next(network().parameters()))
    fails = False
    assert replays_of(lambda: [step(*batch) for batch in data]) == 6
    with pytest.raises(TypeError, match="the loss should return a tensor, got float"):
        made(model, torch.optim.Adam(model.parameters()), lambda out, y: 1.0)(*data[0])


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
def test_averaged_weights(meshes: list[Operators], device: str) -> None:
    found = []
    for graphs in (False, True):
        model = network().to(device)
        average = WeightAverage(model, 0.5)
        step = made(model, ADAM(model.parameters()), F.cross_entropy, average=average)
        step.graphs = graphs
        for batch in batches(meshes, device):
            step(*batch)
        average.write()
        found.append(list(average.network.parameters()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


class Shifted(nn.Module):
    """A network with an argument for each mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, o: Operators, shift: Tensor) -> Tensor:
        return self.net(x + shift.repeat_interleave(o.ptr.diff(), 0, output_size=len(x)), o)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("device", DEVICES)
def test_arguments_of_meshes(meshes: list[Operators], device: str) -> None:
    data = [(*batch, torch.randn(1, 3).to(device)) for batch in batches(meshes, device)]
    found = []
    for graphs in (False, True):
        model = Shifted().to(device)
        step = made(model, ADAM(model.parameters()), F.cross_entropy)
        step.graphs = graphs
        found.append(torch.stack([step(*batch) for batch in data]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


SEVERAL = {
    "a number": (partial(F.cross_entropy, ignore_index=-1), {}),
    "rows": (partial(F.cross_entropy, reduction="none", ignore_index=-1), {}),
    "weights": (
        partial(F.cross_entropy, ignore_index=-1, weight=1.0 + torch.arange(CLASSES)),
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

    assert replays_of(trained) > 10
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


@pytest.mark.parametrize("device", DEVICES)
def test_updates_are_recorded(meshes: list[Operators], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is, and gives the bits of one that is not, also after changes of rate, state and mode."""
    batch = batches(meshes, device)[0]
    found = []
    for recorded in (True, False):
        if not recorded:
            monkeypatch.setattr(StepGraphs, "update", lambda self: None)
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
        assert replays_of(lambda: [step(*batch) for batch in data]) == expected  # noqa: B023
        step.reset()
        assert replays_of(lambda: [step(*batch) for batch in data]) == expected  # noqa: B023


def test_smaller_batches_than_announced(meshes: list[Operators], monkeypatch: pytest.MonkeyPatch) -> None:
    """If all announced meshes are too large for graphs, smaller ones have graphs all the same."""
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", 100 * 6 * 4)
    model = network()
    step = made(model, torch.optim.Adam(model.parameters()), F.cross_entropy)
    step.reserve(meshes[2:], batch_meshes=2, batch_vertices=200)
    assert replays_of(lambda: [step(*batch) for batch in batches(meshes)]) == 5  # of 12 and 42 vertices


def test_large_batches_run_without_graphs(meshes: list[Operators], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs then serve batches of half the limit."""
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", 100 * 6 * 4)
    assert_same(batches(meshes, rounds=4), replays=6)


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
        with pytest.raises(error, match=message):
            GraphedStep(*arguments)
    with pytest.raises(ValueError, match="clip should be a finite number of at least 0, got -1"):
        GraphedStep(model, optimizer, F.cross_entropy, clip=-1)
    with pytest.raises(ValueError, match="outputs_at should be one of vertices, faces, edges, global_mean, got 'face'"):
        GraphedStep(model, optimizer, F.cross_entropy, outputs_at="face")
    with pytest.raises(ValueError, match="decay should be above 0 and below 1, got 1"):
        WeightAverage(model, 1)


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


def test_the_compiler_of_pytorch_stays_out() -> None:
    """Importing it takes seconds. Checks run in modes that PyTorch keeps from it by importing it."""
    program = (
        "import sys, torch\n"
        "from diffnet.cuda_graphs.loss_rows import _IndicesOnCPU\n"
        "with _IndicesOnCPU():\n"
        "    torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(2).long())\n"
        "from diffnet.cuda_graphs.random_numbers import same_random_numbers\n"
        "with same_random_numbers(torch.device('cpu')):\n"
        "    torch.nn.functional.dropout(torch.ones(2), 0.5)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
