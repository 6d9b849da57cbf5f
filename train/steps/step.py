"""One training step: the loss, its gradients, and the optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffnet import DiffusionNet
from diffnet.cuda_graphs.lane import Recorder, record_graph
from diffnet.data import Sample, TargetsAt, rotate_vectors, vector_channels
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.train.batches import Batch
from diffnet.train.device import autocast
from diffnet.train.options import TrainOptions
from diffnet.train.steps.averaging import WeightAverage
from diffnet.train.steps.captured_steps import CapturedSteps
from diffnet.train.tasks.task import Task


class TrainingStep:
    """Trains a network on one batch per call.

    tally: the tally of all steps since it was set to 0, under dropout, see `Task`
    average: gets the weights after each step
    """

    def __init__(
        self,
        task: Task[Any, Any],
        model: DiffusionNet,
        options: TrainOptions,
        device: torch.device,
        average: WeightAverage | None = None,
    ) -> None:
        self._task, self._model, self._options, self._device = task, model, options, device
        self.optimizer = make_optimizer(model, options, device)
        self._average = average
        self._vectors = vector_channels(options.features)
        self.tally = task.new_tally(model.last.out_features, device)
        self._captured: CapturedSteps | None = None

    def capture(self, labels_at: TargetsAt, meshes: Sequence[Operators], recorder: Recorder = record_graph) -> None:
        """Replay CUDA graphs from now on.

        meshes: the operators of all training meshes
        recorder: see `Lane`
        """
        self._captured = CapturedSteps(
            self._loss,
            self._step,
            self._model,
            labels_at,
            meshes,
            self._options,
            self._device,
            recorder,
        )

    def __call__(self, sample: Sample, rotations: Tensor | None = None) -> Tensor:
        """Train on a sample that lies on the device. Returns the loss (), a new tensor.

        rotations: (B, 3, 3), by which the vectors in the features of each mesh are rotated, or None
        """
        batch = Batch(sample.features, sample.labels, sample.operators, rotations)
        if self._captured is not None:
            try:
                return self._captured(batch).clone()
            except NotCapturable as reason:
                self._captured = None
                warnings.warn(f"training runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=2)
        return self._step(batch)

    def _outputs(self, batch: Batch) -> Tensor:
        features = batch.features
        if batch.rotations is not None:
            features = rotate_vectors(features, self._vectors, batch.rotations, batch.operators.ptr)
        with autocast(self._options.precision, self._device):
            features = self._task.inputs(self._model, features, batch.operators, self._options)
            outputs: Tensor = self._model(features, batch.operators)
        return self._task.from_network(outputs, batch.operators, self._options)

    def _loss(self, batch: Batch) -> Tensor:
        return self._task.loss(self._outputs(batch), batch.labels, self._options)

    def _step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self._outputs(batch)
        loss = self._task.loss(outputs, batch.labels, self._options)
        descend(loss, self._model, self.optimizer, self._options.clip)
        if self._average is not None:
            self._average.update()
        predictions = self._task.predict(outputs.detach())
        self.tally += self._task.tally(predictions, batch.labels, outputs.shape[-1])
        return loss.detach()


def descend(loss: Tensor, network: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
    """Add the gradients of a loss to those of the network, and take a step of the optimizer.

    clip: the norm to which longer gradients are scaled down; 0 for no limit
    """
    loss.backward()  # type: ignore[no-untyped-call]
    if clip > 0:
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
    optimizer.step()


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
    """Adam, with one pass over each parameter. On a GPU, one kernel updates all, and a CUDA graph can record it."""
    if device.type != "cuda":
        return Adam(model.parameters(), lr=options.learning_rate, fused=True)
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
