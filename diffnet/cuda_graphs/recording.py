"""Records the forward and the backward pass of a network on buffers of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import BatchBuffers, NotCounted, Rows
from diffnet.cuda_graphs.gradients import Groups, groups_of, runs_of, split
from diffnet.cuda_graphs.lane import Graph, Lane
from diffnet.cuda_graphs.random_numbers import forked_random_numbers
from diffnet.cuda_graphs.replica import Replica, check_reads_only
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.cuda_graphs.static_operators import Fields, StaticOperators
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.launcher import compile_ahead, saved_as_usual

# The count of `BatchSize` that gives the rows of the output.
ROWS = {"vertices": "vertices", "faces": "faces", "edges": "edges", "global_mean": "meshes"}


@dataclass
class Recording:
    """The graphs of a network for one size, and the buffers that they read and write.

    forward, backward: the graphs; backward is None if nothing needs a gradient
    output, output_grad, features_grad: buffers with the rows of a batch first
    fields: the fields of the operators that the network reads
    gradients: buffers for the gradients of the parameters, one for each group of `learned`
    learned: the numbers of these parameters. Unused parameters have no gradient.
    """

    buffers: BatchBuffers
    output: Tensor
    forward: Graph
    fields: Fields
    backward: Graph | None = None
    output_grad: Rows | None = None
    features_grad: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    learned: Groups = ()

    def load(self, features: Tensor, operators: Operators) -> None:
        """Copy a batch into the buffers."""
        self.buffers.load(operators, features)


def record_network(
    network: nn.Module,
    outputs_at: str,
    lane: Lane[Recording],
    size: BatchSize,
    counted: frozenset[str],
    features: Tensor,
    operators: Operators,
    fields: Fields | None = None,
) -> Recording:
    """Record a network on buffers that hold a batch. Autocast, modes and gradients are those of the caller.

    fields: the fields of the operators that the network reads. None if it has not been recorded yet; then its kernels
        are compiled first.

    Raises NotCounted, see `BatchBuffers`, and NotCapturable if the network can't be recorded.
    """
    arena, rows, channels = lane.arena, ROWS[outputs_at], features.shape[1]
    buffers = BatchBuffers(arena, size, counted, operators)
    static = StaticOperators(buffers)
    given = buffers.add(arena.take("features", size, lambda s: (s.vertices, channels), features.dtype))
    buffers.load(operators, features)
    leaf = given.detach().requires_grad_(features.requires_grad and torch.is_grad_enabled())
    tape: list[Tensor] = []

    def of_output(name: str, out: Tensor) -> Tensor:
        dims = out.shape[1:]
        return arena.take(name, size, lambda s: (getattr(s, rows), *dims), out.dtype)

    def forward() -> None:
        out = replica(leaf, static)
        tape[:] = [out]
        of_output("output", out).copy_(out.detach())

    with lane.stream(), saved_as_usual():
        if fields is None:
            compile_network(network, leaf, static)
            buffers.load(operators, features)
        with trial(), forked_random_numbers(features.device):  # loads kernels; the results are not used
            # Buffers and remembered fields of the operators outlive the trial, so the graphs' memory can't hold them.
            static.read(fields or [])
            replica = Replica(network, copies_buffers=True)
            with nullcontext() if fields is None else lane.memory():
                example, numbers = _first_call(replica, leaf, static, getattr(size, rows))
        output = of_output("output", example)
        replica = Replica(network, copies_buffers=False)
        functions: list[Callable[[], None]] = [forward]
        parts: dict[str, Any] = {}
        if numbers:
            learned = groups_of(replica.parameters, [i - 1 for i in numbers if i > 0])
            gradients, targets = _gradient_buffers(lane, replica.parameters, learned)
            sources = [replica.parameters[i] for group in learned for i in group]
            output_grad, features_grad = of_output("output_grad", output), None
            if 0 in numbers:
                features_grad = arena.take("features_grad", size, lambda s: (s.vertices, channels), features.dtype)
                targets, sources = [features_grad, *targets], [leaf, *sources]

            def backward() -> None:
                # This frees the saved tensors, and other tensors reuse their memory. A second backward pass needs
                # another forward pass, see `replay_again`.
                grads = torch.autograd.grad(tape[0], sources, output_grad)
                torch._foreach_copy_(targets, grads)

            functions.append(backward)
            parts = {
                "output_grad": Rows(output_grad),
                "features_grad": features_grad,
                "gradients": gradients,
                "learned": learned,
            }
        graphs = lane.record(functions)
        buffers.complete()
        if features.is_cuda:
            tape.clear()  # the memory is free for other recordings
        backward_graph = graphs[1] if numbers else None
        return Recording(buffers, output, graphs[0], static.fields_read(), backward_graph, **parts)


def _first_call(replica: Replica, leaf: Tensor, static: StaticOperators, rows: int) -> tuple[Tensor, list[int]]:
    """Run both passes. Returns an output without memory, and the numbers of the inputs that get a gradient."""
    out = replica(leaf, static)
    check_output(out, rows)
    return out.detach().to("meta"), _with_gradients(out, [leaf, *replica.parameters])


def compile_network(network: nn.Module, features: Tensor, operators: Operators) -> None:
    """Compile the kernels of a network in several threads before its first call, see `compile_ahead`.

    Raises NotCapturable if the call fails.
    """
    with forked_random_numbers(features.device), trial():
        replica = Replica(network, copies_buffers=True)
        leaf = features.detach().requires_grad_(features.requires_grad and torch.is_grad_enabled())
        compile_ahead(lambda: replica(leaf, operators), [leaf, *replica.parameters])


def check_output(out: Any, rows: int) -> None:
    """Raise NotCapturable if the output of a network is not one tensor with this many rows."""
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != rows:
        raise NotCapturable("its output is not one tensor with a row for each of the vertices, or of its `outputs_at`")


def _with_gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[int]:
    """Run the backward pass and return the numbers of the inputs that get a gradient.

    Raises NotCapturable if a graph would lack a gradient, see `check_reads_only`.
    """
    check_reads_only(out, inputs)
    needed = [i for i, x in enumerate(inputs) if x.requires_grad] if out.requires_grad else []
    if not needed:
        return []
    grads = torch.autograd.grad(out, [inputs[i] for i in needed], torch.zeros_like(out), allow_unused=True)
    return [i for i, grad in zip(needed, grads, strict=True) if grad is not None]


def _gradient_buffers(
    lane: Lane[Recording], parameters: Sequence[Tensor], groups: Groups
) -> tuple[list[Tensor], list[Tensor]]:
    """One buffer for each group of parameters, and its parts for each parameter. Recordings of all sizes share them."""
    buffers: list[Tensor] = []
    parts: list[Tensor] = []
    for group in groups:
        runs = runs_of(parameters[i].shape for i in group)
        shape, dtype = (sum(run.size for run in runs),), parameters[group[0]].dtype
        buffers.append(lane.arena.take("gradients", BatchSize(0, 0), lambda size, shape=shape: shape, dtype))  # type: ignore[misc]
        parts += split(buffers[-1], runs)
    return buffers, parts


def random_state(device: torch.device) -> Tensor:
    """The state of the random generator of a device."""
    return _generator(device).get_state()


def replay_again(recording: Recording, network: nn.Module, device: torch.device, random: Tensor) -> None:
    """Replay the forward graph once more, with the same random numbers. The backward graph has overwritten its tensors.

    random: the state of the random generator before the first replay
    """
    with preserved(network, device):
        _generator(device).set_state(random)
        recording.forward.replay()


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextmanager
def trial() -> Iterator[None]:
    """Turn errors of a first run on buffers into NotCapturable. Without graphs, the network runs or raises its own."""
    try:
        yield
    except (NotCounted, NotCapturable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotCapturable(f"it can't run on buffers ({type(error).__name__}: {error})") from error


@contextmanager
def preserved(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers of a network and the random generators after the block."""
    buffers = list(network.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        with forked_random_numbers(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
