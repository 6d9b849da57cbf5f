"""`GraphedStep` updates weights by the kernel of Adam, as PyTorch's optimizers do. Without a GPU, it is interpreted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import DEVICES, EmulatedGraph, network
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

from diffnet import GraphedStep, WeightAverage, precompute
from diffnet.cuda_graphs import optimizers
from diffnet.ops.adam import kernels
from diffnet.train.steps.step import Adam

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Signed(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors of the updates by the kernel. On the CPU, it is used, too."""
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
def test_steps(optimizer: Optimizer, device: str, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
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
