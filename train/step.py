"""One training step: the loss, its gradients, and the optimizer."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.data import UNLABELED, Sample
from diffnet.ops import Backend, cross_entropy
from diffnet.train.capture import CapturedStep
from diffnet.train.device import autocast
from diffnet.train.options import TrainOptions


class TrainingStep:
    """Trains the network on one sample per call. Returns the loss () and the predicted classes (N,) int64.

    capture: record the step of each sample that stays on the GPU as a CUDA graph, and replay it from then on
    """

    def __init__(
        self,
        model: DiffusionNet,
        optimizer: torch.optim.Optimizer,
        options: TrainOptions,
        device: torch.device,
        capture: bool,
    ) -> None:
        self._model, self._optimizer, self._options, self._device = model, optimizer, options, device
        # By the operators' id. Each entry holds its sample, so its operators live on and no others get their id.
        self._captured: dict[int, tuple[Sample, CapturedStep[tuple[Tensor, Tensor]]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def __call__(self, sample: Sample, stays: bool) -> tuple[Tensor, Tensor]:
        """stays: whether the operators are the same tensors in every epoch, so that a graph can read them again"""
        if self._pool is None or not stays:
            return self._step(sample)
        key = id(sample.operators)
        if key not in self._captured:
            own = replace(sample, features=sample.features.clone())
            self._captured[key] = own, CapturedStep(partial(self._step, own), self._pool)
        own, step = self._captured[key]
        own.features.copy_(sample.features)
        return step()

    def _step(self, sample: Sample) -> tuple[Tensor, Tensor]:
        self._optimizer.zero_grad(set_to_none=True)
        with autocast(self._options.precision, self._device):
            logits = self._model(sample.features, sample.operators)
        loss = segmentation_loss(logits, sample.labels, self._options.backend)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach(), logits.detach().argmax(-1)


def segmentation_loss(logits: Tensor, labels: Tensor, backend: Backend = "auto") -> Tensor:
    """The mean cross-entropy () over labeled elements. 0 if there are none.

    logits: (N, C). labels: (N,) int64, `UNLABELED` where unlabeled.
    """
    # PyTorch's own loss computes this mean on a single multiprocessor of the GPU. A separate sum uses all of them.
    return cross_entropy(logits, labels, UNLABELED, backend=backend).sum() / (labels != UNLABELED).sum().clamp(min=1)


class Adam(torch.optim.Adam):
    """`torch.optim.Adam` without the wrappers by which `torch.compile` recognizes it.

    On their first call, the wrappers import the compiler, which takes 1 to 2 seconds. Nothing here compiles a step.
    """

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)


def make_optimizer(model: DiffusionNet, options: TrainOptions, device: torch.device) -> torch.optim.Optimizer:
    """Adam. On a GPU, one kernel updates all parameters, and a CUDA graph can record it."""
    if device.type != "cuda":
        return Adam(model.parameters(), lr=options.learning_rate)
    rate = torch.tensor(options.learning_rate, device=device)
    return Adam(model.parameters(), lr=rate, fused=True, capturable=True)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of a stored optimizer. All settings stay those that `make_optimizer` chose for its device."""
    optimizer.load_state_dict({"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]})


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, in place if it is a tensor that a CUDA graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
