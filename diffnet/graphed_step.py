"""A training step whose kernels are launched at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import Batch
from diffnet.cuda_graphs.forward import GraphedForward
from diffnet.cuda_graphs.lane import Recorder, record_graph
from diffnet.cuda_graphs.losses import Loss
from diffnet.cuda_graphs.module_state import GRAPHS, has_hooks
from diffnet.cuda_graphs.modules import RowWise
from diffnet.cuda_graphs.plain_step import PlainStep, Weight
from diffnet.cuda_graphs.runtime import ROWS, Expected, Settings, may_have_graphs, uses_graphs
from diffnet.cuda_graphs.sizes import MeshSizes, sizes_of
from diffnet.cuda_graphs.whole_step import StepGraphs
from diffnet.geometry import Operators
from diffnet.weight_average import WeightAverage


class GraphedStep:
    """A training step that launches all of its kernels at once: forward, loss, backward, clipping and optimizer.

    `value = step(features, operators, targets)` trains on a batch of any size. On a GPU, the first step of about one
    size runs kernel by kernel and is recorded as a CUDA graph, which later steps replay. `diffnet train` uses this
    class.

    Args:
        model: a module that is called with features (V, C) and `Operators`, and returns one tensor of N rows
        optimizer: of PyTorch, made as usual
        loss: a function or module of the outputs (N, …) and the targets. It returns a number, or a tensor whose first
            dimension is N, as with `reduction="none"`, of which the step takes the mean.
        clip: the norm to which longer gradients are scaled down; 0 for no limit
        average: gets the weights after each step
        weight: of a batch for `add`, a function of the targets that returns (). None takes what the loss divides by.
        ignore_index: the integer target that a loss of your own ignores in its mean, for `add`
        outputs_at: "vertices", "faces", "edges", "global_mean" or "pairs", of two meshes that follow each other: the N
            rows of the outputs. None takes the model's attribute of this name at each call, or "vertices".
        row_wise: see `graphed`

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

    What a graph holds depends on what is known to be right with the rows that buffers add to a batch:

    - One graph holds the whole step if the loss and the optimizer are known: the losses of PyTorch and diffnet for
      labels and for numbers, as modules, functions, or `functools.partial` with keyword arguments, and exactly Adam,
      AdamW and SGD of PyTorch, without hooks.
    - With any other loss or optimizer, also a subclass, or with hooks of parameters, the network has graphs as by
      `graphed`. The loss gets outputs without added rows, and the loss and the optimizer run as you wrote them.
    - The network is treated as by `graphed` in both cases.

    Steps also run without graphs, with the same results up to rounding. They do so on the CPU, if a batch is so large
    that its kernels take longer than launching them (see `graphed`), and if a graph is impossible. In the last case, a
    RuntimeWarning says why, once: in the cases of `graphed`, if a module has hooks, if targets of a known loss have
    other rows than the outputs, and if the features or targets need a gradient.

    Raises TypeError for a model that is no module, an optimizer that is none of PyTorch, and a loss that can't be
    called or returns no tensor. Raises ValueError for a negative `clip`, an unknown `outputs_at`, and a loss with
    another number of rows.

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
        loss: Loss,
        *,
        clip: float = 0.0,
        average: WeightAverage[Any] | None = None,
        weight: Weight | None = None,
        ignore_index: int | None = None,
        outputs_at: str | None = None,
        row_wise: RowWise = (),
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
        self._model, self._outputs_at, self._row_wise = model, outputs_at, tuple(row_wise)
        self._plain = PlainStep(model, optimizer, loss, clip, average, weight, ignore_index)
        self._expected: Expected | None = None
        self._graphs: tuple[StepGraphs, GraphedForward] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_graphs": None}  # a copy records its own

    def __call__(self, features: Tensor, operators: Operators, targets: Any, *further: Tensor) -> Tensor:
        return self._run(Batch(features, operators, further, targets), adds=False)

    def add(self, features: Tensor, operators: Operators, targets: Any, *further: Tensor) -> None:
        """Add a batch to the next step, which `update` takes. The arguments are those of a call.

        The mean of all batches has the weights that their losses divide by, see `weight`. So the step is that of one
        batch with all of their meshes, up to rounding, if the loss is a mean over targets or rows.

        Raises ValueError if it is not known what the loss divides by, TypeError for sharded parameters, and
        RuntimeError if the optimizer has got other parameters since the first batch.
        """
        self._plain.sums()  # before a graph is recorded, whose memory can't hold it
        self._run(Batch(features, operators, further, targets), adds=True)

    def update(self, reduce: Callable[[Tensor], Any] | None = None) -> Tensor:
        """Take the step of all batches since the last one: clipping, optimizer and average. Returns the loss ().

        reduce: gets one tensor (P + 2 + N,) and changes it in place, as `torch.distributed.all_reduce` does: the sums
            of the gradients of all P weights and of the losses, multiplied by the weights of their batches, the sum of
            these, and for each of the N parameters how many batches have reached it. With `all_reduce`, the step is
            that of the batches of all processes. A process may have none.

        A parameter that no batch of any process has reached stays as it is. The reduced counts say so on the device,
        so nothing is read back. `reduce` is called between two graphs. If no batch counts, the loss and all gradients
        are 0.
        """
        sums = self._plain.sums()
        with torch.no_grad():
            if reduce is not None:
                reduce(sums)
            value = None
            if self._uses_graphs(sums):
                value = self._graphs_on(sums.device)[0].update(reduce is not None)
            return self._plain.update(reduce is not None) if value is None else value.clone()

    def _uses_graphs(self, x: Tensor) -> bool:
        """Whether graphs are on. Every process decides alike whether its optimizer takes steps of a graph."""
        uses = self.graphs and uses_graphs(x, self.recorder)
        if uses and (self.watches or not self._plain.fuses):
            self._plain.fuses = self._plain.optimizer.is_known()
        return uses

    def _run(self, batch: Batch, adds: bool) -> Tensor:
        try:
            value: Tensor | None = None
            forward: Callable[..., Tensor] = self._model
            if self._uses_graphs(batch.features):
                value, forward = self._by_graphs(batch, adds)
            if value is None:
                return self._plain(batch, forward, adds)
            return value if adds else value.clone()
        except BaseException:
            self._graphs = None  # the next step starts anew
            raise

    def _by_graphs(self, batch: Batch, adds: bool) -> tuple[Tensor | None, Callable[..., Tensor]]:
        """The loss () of a whole step by graphs, or None, and the forward pass that a step without it takes."""
        whole, forward = self._graphs_on(batch.features.device)
        at = whole.outputs_at()
        if not may_have_graphs(batch, at, self.recorder):
            return None, self._model
        facts = whole.step_facts(batch.targets)
        if facts is not None:
            return whole(batch, at, facts, adds), self._model
        if GRAPHS in vars(self._model):
            return None, self._model  # it has graphs of its own
        if has_hooks(self._model):
            forward.say("a module has hooks, which a graph would not call")
            return None, self._model
        return None, forward

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
        for graphs in self._graphs or ():
            graphs.clear()
        self._graphs = None

    def _graphs_on(self, device: torch.device) -> tuple[StepGraphs, GraphedForward]:
        """The graphs of whole steps and those of the forward pass."""
        if self._graphs is None or self._graphs[0].device != device:
            settings = Settings(self._outputs_at, 1, self._row_wise, self.recorder)
            whole = StepGraphs(self._plain, settings, device, self._expected)
            whole.watches = self.watches
            self._graphs = whole, GraphedForward(self._model, settings, "training", self._expected)
        return self._graphs
