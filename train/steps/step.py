"""One training step: the loss, its gradients, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffnet import DiffusionNet, GraphedStep, WeightAverage
from diffnet.cuda_graphs.lane import Recorder, record_graph
from diffnet.cuda_graphs.losses import MaskedLoss
from diffnet.cuda_graphs.optimizers import Adam
from diffnet.cuda_graphs.sizes import MeshSizes
from diffnet.data import Sample, rotate_vectors, vector_channels
from diffnet.data.samples import output_rows
from diffnet.geometry import Operators
from diffnet.train.device import autocast
from diffnet.train.options import TrainOptions
from diffnet.train.tasks.task import Task


class TrainingStep:
    """Trains a network on one batch per call.

    tally: the tally of all steps since it was set to 0, under dropout, see `Task`
    sums: (2,) float64, the same of what the losses count times the losses, and of what they count
    average: gets the weights after each step
    """

    def __init__(
        self,
        task: Task[Any, Any],
        model: DiffusionNet,
        options: TrainOptions,
        device: torch.device,
        average: WeightAverage[DiffusionNet] | None = None,
    ) -> None:
        self.task, self.model, self.options, self.device = task, model, options, device
        self.optimizer = make_optimizer(model, options, device)
        loss = _TaskLoss(task, options, task.new_tally(model.out_channels, device, options))
        self.tally, self.sums = loss.tally, loss.sums
        self._step = GraphedStep(
            _TaskNetwork(task, model, options), self.optimizer, loss, clip=options.clip, average=average
        )
        self._step.graphs = self._step.watches = False
        self._autocast = autocast(options.precision, device)

    def capture(
        self,
        meshes: Sequence[Operators] | MeshSizes,
        recorder: Recorder = record_graph,
        limits: tuple[int | None, int | None] | None = None,
    ) -> None:
        """Replay CUDA graphs from now on.

        meshes: the operators of all training meshes, or their sizes
        limits: of the meshes and the vertices of a batch or a part of one. By default those of the options.
        recorder: see `Lane`
        """
        self._step.graphs, self._step.recorder = True, recorder
        self._step.reserve(meshes, *(limits or (self.options.batch_meshes, self.options.batch_vertices)))

    def __call__(self, sample: Sample, rotations: Tensor | None = None) -> Tensor:
        """Train on a sample that lies on the device. Returns the loss (), a new tensor.

        rotations: (B, 3, 3), by which the vectors in the features of each mesh are rotated, or None
        """
        with self._autocast:
            return self._step(*_arguments(sample, rotations))

    def add(self, sample: Sample, rotations: Tensor | None = None) -> None:
        """Add a part of a batch to the next step, see `GraphedStep.add`."""
        with self._autocast:
            self._step.add(*_arguments(sample, rotations))

    def update(self, reduce: Callable[[Tensor], Any]) -> Tensor:
        """Take the step, see `GraphedStep.update`. Returns the loss (), a new tensor."""
        return self._step.update(reduce)


def _arguments(sample: Sample, rotations: Tensor | None) -> tuple[Any, ...]:
    further = () if rotations is None else (rotations,)
    features, operators, *conditions = sample.inputs
    return features, operators, sample.labels, *conditions, *further


class _TaskNetwork(nn.Module):
    """A network with what its task does before and after it. It is called under autocast."""

    def __init__(self, task: Task[Any, Any], model: DiffusionNet, options: TrainOptions) -> None:
        super().__init__()
        self.model, self.outputs_at = model, model.outputs_at if task.meshes_of_sample == 1 else "pairs"
        self._task, self._options, self._vectors = task, options, vector_channels(options.features)

    def forward(self, features: Tensor, operators: Operators, *further: Tensor) -> Tensor:
        """further: the conditions, if there are any, and the rotations, if there are any"""
        has_conditions = self.model.condition_channels > 0
        conditions, rotations = further[:has_conditions], further[has_conditions:]
        if rotations:
            with torch.autocast(features.device.type, enabled=False):
                features = rotate_vectors(features, self._vectors, rotations[0], operators.ptr)
        outputs = output_rows(self.model(features, operators, *conditions), self.outputs_at, operators)
        with torch.autocast(features.device.type, enabled=False):
            return self._task.from_network(outputs, operators, self._options)


class _TaskLoss(MaskedLoss):
    """The loss of a task. It adds to the tally and the sums, buffers that first calls on buffers leave alone."""

    tally: Tensor
    sums: Tensor
    _loss_and_one: Tensor

    def __init__(self, task: Task[Any, Any], options: TrainOptions, tally: Tensor) -> None:
        super().__init__()
        self._task, self._options = task, options
        self._counted = task.counted(options)
        self.register_buffer("tally", tally)
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64, device=tally.device))
        self.register_buffer("_loss_and_one", torch.ones(2, dtype=torch.float64, device=tally.device))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(outputs.device.type, enabled=False):
            predictions = self._task.to_score(outputs.detach(), self._options)
            self.tally.add_(self._task.tally(predictions, targets, outputs.shape[-1], self._options))
            loss: Tensor = self._task.loss(outputs, targets, self._options)
            if self._task.term is not None:
                loss = loss + self._task.term(outputs, targets)
            self._loss_and_one[0].copy_(loss.detach())
            self.sums.addcmul_(self._loss_and_one, self._counted(targets))  # few kernels: a step has about a hundred
            return loss

    def divisor(self, targets: Tensor) -> Tensor:
        return self._task.loss_weight(self._options)(targets)


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
