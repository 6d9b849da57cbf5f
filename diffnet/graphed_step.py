"""A training step whose kernels are launched at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.calls import may_have_graphs
from diffnet.cuda_graphs.lane import Recorder, record_graph
from diffnet.cuda_graphs.loss_rows import IGNORED
from diffnet.cuda_graphs.plain_step import PlainStep, StepBatch
from diffnet.cuda_graphs.recording import ROWS
from diffnet.cuda_graphs.sizes import MeshSizes, sizes_of
from diffnet.cuda_graphs.whole_step import Expected, StepGraphs
from diffnet.geometry import Operators
from diffnet.weight_average import WeightAverage


class GraphedStep:
    """A training step that launches all of its kernels at once: forward, loss, backward, clipping and optimizer.

    `value = step(features, operators, targets)` trains on a batch of any size. On a GPU, the first step of about one
    size runs kernel by kernel and is recorded as a CUDA graph, which later steps replay. `diffnet train` uses this
    class.

    Args:
        model: a module that is called with features (V, C) and `Operators`, and returns one tensor of N rows
        optimizer: of PyTorch, made as usual. It is Adam, AdamW, SGD, or another one with the option `capturable`, which
            need not be set.
        loss: a function or module of the outputs (N, …) and the targets (N, …). It returns a number, or a tensor whose
            first dimension is N, as with `reduction="none"`, of which the step takes the mean.
        clip: the norm to which longer gradients are scaled down; 0 for no limit
        average: gets the weights after each step
        weight: of a batch for `add`, a function of the targets that returns (). None counts the targets that are not
            ignored. It is not used if the loss returns N rows, which it counts then.
        ignore_index: the integer target that the loss ignores. None finds out whether it is −1 or −100. It is not
            needed if the loss returns N rows.
        outputs_at: "vertices", "faces", "edges" or "global_mean": the N rows of the outputs. None takes the model's
            attribute of this name at each call, or "vertices".

    Attributes:
        graphs: whether to use graphs. It may be changed at any time.

    A call takes features (V, C) and targets (N, …) on the device of the model, and the operators of the batch. Further
    arguments are tensors (B, …) with a row for each mesh, which the model gets after the operators. It returns the loss
    (), a new tensor without gradient. Autocast around the call applies to the model and the loss.

    `add` and `update` are a step on several batches, also of several processes: `add` takes a batch, and `update` takes
    the step.

    A step drops gradients from before, and `.grad` is None afterwards. A changed `group["lr"]`, as by a scheduler of
    PyTorch, counts in the next step. If the model, another option of the optimizer, or the tensors of its state are
    replaced, as by `optimizer.load_state_dict`, the steps are recorded anew. What a graph doesn't notice is listed in
    `diffnet.graphed`; call `reset` after such a change.

    Steps also run without graphs, with the same results up to rounding. They do so on the CPU, if a batch is so large
    that its kernels take longer than launching them (see `graphed`), and if a graph is impossible. In the last case, a
    RuntimeWarning says why, once:

    - The network can't have graphs: those cases of `graphed` that concern its forward pass, or hooks on any module.
    - Rows that are added to a batch change the loss. Graphs read buffers that are larger than the batch. A loss that is
      a number must ignore added rows. Their targets are `ignore_index`, or NaN if targets are floating-point numbers. A
      loss that returns N rows needs nothing.
    - The loss or the network reads a value back from the GPU, as `.item()` does.
    - The optimizer has hooks or no option `capturable`, or an option besides the learning rate changes in each step.
      Pass `cycle_momentum=False` to `OneCycleLR`.
    - The features or targets need a gradient.

    Raises TypeError for a model that is no module, an optimizer that is none of PyTorch, and a loss that can't be
    called or returns no tensor. Raises ValueError for a negative `clip` and an unknown `outputs_at`.

    >>> import torch
    >>> from diffnet import DiffusionNet
    >>> model = DiffusionNet(3, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> step = GraphedStep(model, optimizer, torch.nn.functional.cross_entropy, clip=1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        clip: float = 0.0,
        average: WeightAverage[Any] | None = None,
        weight: Callable[[Tensor], Tensor] | None = None,
        ignore_index: int | None = None,
        outputs_at: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model should be a module such as DiffusionNet, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer should be one of torch.optim, got {type(optimizer).__name__}")
        if not callable(loss):
            raise TypeError(f"loss should be a function of outputs and targets, got {type(loss).__name__}")
        if not (math.isfinite(clip) and clip >= 0):
            raise ValueError(f"clip should be a finite number of at least 0, got {clip}")
        if outputs_at is not None and outputs_at not in ROWS:
            raise ValueError(f"outputs_at should be one of {', '.join(ROWS)}, got {outputs_at!r}")
        self.graphs = True
        self.recorder: Recorder = record_graph  # tests on the CPU set another one, see `Lane`
        self.watches = True  # `diffnet train` sets False, because nothing else has its network and its optimizer
        self._model, self._ignore_index, self._outputs_at = model, ignore_index, outputs_at
        weight = partial(_counted, ignore_index=ignore_index) if weight is None else weight
        self._plain = PlainStep(model, optimizer, loss, clip, average, weight)
        self._expected: Expected | None = None
        self._on_graphs: StepGraphs | None = None
        self._said: set[str] = set()

    def __call__(self, features: Tensor, operators: Operators, targets: Tensor, *further: Tensor) -> Tensor:
        return self._run(StepBatch(features, operators, targets, further), adds=False)

    def add(self, features: Tensor, operators: Operators, targets: Tensor, *further: Tensor) -> None:
        """Add a batch to the next step, which `update` takes. The arguments are those of a call.

        The mean of all batches has the weights that their losses divide by, see `weight`. So the step is that of one
        batch with all of their meshes, up to rounding, if the loss is a mean over targets or rows.
        """
        self._plain.sums()  # before a graph is recorded, whose memory can't hold it
        self._run(StepBatch(features, operators, targets, further), adds=True)

    def update(self, reduce: Callable[[Tensor], Any] = lambda sums: None) -> Tensor:
        """Take the step of all batches since the last one: clipping, optimizer and average. Returns the loss ().

        reduce: gets one tensor (P + 2,) and changes it in place, as `torch.distributed.all_reduce` does: the sums of
            the gradients of all P weights and of the losses, multiplied by the weights of their batches, and the sum of
            these. With `all_reduce`, the step is that of the batches of all processes. A process may have none.

        `reduce` is called between two graphs. If no batch counts, the loss and all gradients are 0.
        """
        sums = self._plain.sums()
        if self.graphs and (sums.is_cuda or self.recorder is not record_graph):
            self._plain.capturable = self._plain.optimizer.refused() is None  # as in a process that has a batch
        with torch.no_grad():
            reduce(sums)
            found = None
            if self.graphs and self._on_graphs is not None and self._on_graphs.device == sums.device:
                found = self._on_graphs.update()
            return self._plain.update() if found is None else found.clone()

    def _run(self, batch: StepBatch, adds: bool) -> Tensor:
        reason = None
        try:
            found, outputs_at = None, self._outputs_now()
            if self.graphs and outputs_at in ROWS and may_have_graphs(batch.features, batch.operators, self.recorder):
                found, reason = self._graphs_on(batch.features.device)(batch, outputs_at, adds)
            if found is not None:
                loss = found if adds else found.clone()
            elif adds:
                loss = self._plain.add(batch)
            else:
                loss = self._plain(batch)
        except BaseException:
            self._on_graphs = None  # the next step starts anew
            raise
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"training runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=3)
        return loss

    def reserve(
        self,
        meshes: Sequence[Operators] | MeshSizes,
        batch_meshes: int | None = None,
        batch_vertices: int | None = None,
    ) -> None:
        """Announce the operators of all training meshes, so that buffers are made for the largest batch at once.

        Without it, the first batch that is larger than all before drops all graphs, and they are recorded again.

        meshes: the operators, or their sizes if they aren't in memory
        batch_meshes, batch_vertices: the limits of a batch. None is no limit. A mesh with more vertices is a batch of
            its own.
        """
        self.reset()
        sizes = meshes if isinstance(meshes, MeshSizes) else sizes_of(meshes) if meshes else None
        self._expected = None if sizes is None else Expected(sizes, batch_meshes, batch_vertices)

    def reset(self) -> None:
        """Drop all graphs, and return their memory. The next steps are recorded anew."""
        if self._on_graphs is not None:
            self._on_graphs.clear()
        self._on_graphs = None

    def _graphs_on(self, device: torch.device) -> StepGraphs:
        if self._on_graphs is None or self._on_graphs.device != device:
            self._on_graphs = StepGraphs(
                self._plain, self._model, self._ignore_index, device, self.recorder, self._expected, self.watches
            )
        return self._on_graphs

    def _outputs_now(self) -> str:
        where = self._outputs_at
        return getattr(self._model, "outputs_at", "vertices") if where is None else where


def _counted(targets: Tensor, ignore_index: int | None) -> Tensor:
    """The number () of targets that count."""
    if targets.is_floating_point():
        return (~targets.isnan()).sum()
    ignored = IGNORED if ignore_index is None else (ignore_index,)
    counts = [targets != label for label in ignored]
    return torch.stack(counts).all(0).sum()
