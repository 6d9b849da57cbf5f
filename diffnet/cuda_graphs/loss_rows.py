"""How a loss takes the rows that buffers add to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from diffnet.cuda_graphs.dispatch_mode import DispatchMode
from diffnet.cuda_graphs.plain_step import Loss
from diffnet.cuda_graphs.random_numbers import same_random_numbers
from diffnet.cuda_graphs.recording import trial
from diffnet.cuda_graphs.replica import widened
from diffnet.ops.common.cuda_graph import NotCapturable

MAX_ROWS = 1000  # of the batch that the check uses
MAX_DIFFERENCE = 1e-4  # relative; a larger one is not rounding
IGNORED = (-1, -100)  # labels that losses of diffnet and of PyTorch ignore


class LossRows(NamedTuple):
    """How a loss takes added rows.

    target: of added rows
    is_each: whether the loss has a value for each row. The step averages those of the batch then. If not, the loss
        ignores rows with this target.
    """

    target: float
    is_each: bool


def loss_rows(loss: Loss, outputs: Tensor, targets: Tensor, ignore_index: int | None) -> LossRows | None:
    """Find out how a loss takes added rows, by calls with some rows of a batch, and with others added to them.

    outputs (N, …), targets (N, …): of a batch
    ignore_index: the label that the loss ignores. With None, those in `IGNORED` are tried.

    Returns None if no row of this batch counts, so that the calls show nothing.

    Raises NotCapturable, which says why, if added rows change the loss.
    """
    step = -(-len(outputs) // MAX_ROWS)
    outputs, targets = widened(outputs[::step].detach()), targets[::step]
    in_this_thread = torch.autograd.set_multithreading_enabled(False)
    indices_on_cpu = _IndicesOnCPU()  # type: ignore[no-untyped-call]
    with indices_on_cpu, in_this_thread, torch.enable_grad(), torch.autocast(outputs.device.type, enabled=False):
        with trial():
            expected = _results(loss, outputs, targets)
        is_each = expected[0].ndim > 0
        if is_each and len(expected[0]) != len(outputs):
            shape, rows = tuple(expected[0].shape), len(outputs)
            raise NotCapturable(f"the loss should return a number or {rows} rows for {rows} rows, got shape {shape}")
        if not bool(expected[1].nan_to_num().any()):
            return None
        reasons = {}
        for target in _tried(targets, is_each, ignore_index):
            reasons[target] = _difference(loss, outputs, targets, target, expected)
            if reasons[target] is None:
                return LossRows(target, is_each)
    if is_each:
        raise NotCapturable(f"the loss of a row depends on rows that are added to a batch: {reasons[0]}")
    tried = " or ".join(f"{target} ({reason})" for target, reason in reasons.items())
    raise NotCapturable(
        f"the loss doesn't ignore rows that are added to a batch with the target {tried}. "
        "Let it return a value for each row, as with reduction='none'; the step takes their mean. "
        "Or pass the ignored label as ignore_index"
    )


def _tried(targets: Tensor, is_each: bool, ignore_index: int | None) -> Sequence[float]:
    """Targets of added rows."""
    if is_each:
        return (0,)
    if targets.is_floating_point():
        return (math.nan,)
    return IGNORED if ignore_index is None else (ignore_index,)


def _results(loss: Loss, outputs: Tensor, targets: Tensor, counted: int | None = None) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the outputs. Of a loss for each row, those of the first ones.

    counted: the number of rows of the batch
    """
    leaf = outputs.clone().requires_grad_()
    with same_random_numbers(leaf.device):
        values = loss(leaf, targets.clone())
    if values.ndim > 0:
        values = values[:counted]
    (grad,) = torch.autograd.grad(values.mean(), leaf)
    return values.detach(), grad


def _difference(
    loss: Loss, outputs: Tensor, targets: Tensor, target: float, expected: tuple[Tensor, Tensor]
) -> str | None:
    """What added rows with this target change. None if nothing."""
    rows = len(outputs)
    try:
        added = torch.full_like(targets, target)
        values, grad = _results(loss, torch.cat([outputs, outputs.flip(0)]), torch.cat([targets, added]), rows)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if _differs(values, expected[0]):
        return "the value changes"
    if _differs(grad[:rows], expected[1]) or bool((grad[rows:] != 0).any()):  # NaN is not 0
        return "the gradient changes"
    return None


def _differs(found: Tensor, expected: Tensor) -> bool:
    return not torch.allclose(found, expected, rtol=0, atol=MAX_DIFFERENCE * float(expected.norm()), equal_nan=True)


class _IndicesOnCPU(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs PyTorch's operations on indices on the CPU, which raises an error for one out of range.

    A GPU would stop, and refuse all later work of the process.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
        has_indices = any(not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool) for x in tensors)
        if not has_indices or func.namespace != "aten" or func.is_view or func.overloadpacket in _COPIES:
            return func(*args, **kwargs)
        copies = {id(x): x.cpu() for x in tensors}
        moved, options = tree_map_only(Tensor, lambda x: copies.get(id(x), x), (args, kwargs))
        out = func(*moved, **options)
        if func._schema.is_mutable:
            for x in tensors:
                x.copy_(copies[id(x)])
        return tree_map_only(Tensor, lambda x: x.to(tensors[0].device), out)


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
