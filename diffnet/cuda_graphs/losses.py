"""The losses that a graph can hold. They ignore the rows that buffers add to a batch, or are sums over rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.ops import cross_entropy, dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.cross_entropy.op import counted_weight

Loss = Callable[[Tensor, Any], Tensor]
Function = Callable[..., Tensor]

_DICE = (dice_loss, generalized_dice_loss)
# Functions of labels, with the parameters for the label that they ignore and for the weights of the classes.
_OF_LABELS: dict[Function, tuple[str, str]] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), ("ignore_index", "weight")),
    **dict.fromkeys((cross_entropy, label_smoothing_loss, focal_loss, *_DICE), ("ignored", "weights")),
}
# Functions of numbers, which have a value for each of them.
_OF_NUMBERS: dict[type[nn.Module], Function] = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}
_MODULES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss, **_OF_NUMBERS}


class MaskedLoss(nn.Module):
    """Base class of losses (outputs (N, …), targets (N, …)) → () that ignore rows with the target −1, or NaN."""

    def divisor(self, targets: Tensor) -> Tensor:
        """What the loss divides by, (): the number of targets that count, each with its weight."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowLoss:
    """A loss () of buffers with more rows than the batch.

    loss: returns a number, or a value for each row
    ignored: the target of added rows, for which the loss is 0. None if the loss ignores none.
    reduction: "" if the loss returns a number. Of the values of the rows: "mean", "sum", or "batchmean", which divides
        the sum by the number of rows.
    divisor: what the loss of a batch divides by, (), a function of the targets and of `rows`. None if it is not known.
    """

    loss: Loss
    ignored: float | None
    reduction: str = ""
    divisor: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, outputs: Tensor, targets: Tensor, rows: Tensor | None) -> Tensor:
        """rows: (), the number of rows of the batch, which come first. None if there is no reduction."""
        counts = None
        if self.ignored is None:
            if outputs.shape != targets.shape:  # PyTorch would spread the smaller one over the rows of the other
                shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
                raise NotCapturable(f"outputs and targets should have the same shape, got {shapes} with added rows")
            # Added rows repeat the first one, so their derivatives are finite if those of the batch are.
            counts = (torch.arange(len(outputs), device=outputs.device) < cast(Tensor, rows)).view(
                -1, *[1] * (outputs.ndim - 1)
            )
            outputs, targets = (torch.where(counts, x, x[:1]) for x in (outputs, targets))
        values = self.loss(outputs, targets)
        if rows is None:
            return values
        if counts is not None:
            values = torch.where(counts.view(-1, *[1] * (values.ndim - 1)), values, 0)
        total = values.sum()
        if self.reduction == "mean":
            return total / (rows * values.shape[1:].numel())
        return total if self.reduction == "sum" else total / rows


def is_known(loss: Loss) -> bool:
    """Whether a graph may hold a loss, for some targets and options."""
    return isinstance(loss, MaskedLoss) or _call_of(loss)[0] is not None


def row_loss(loss: Loss, targets: Tensor) -> RowLoss | None:
    """How a graph holds a loss of targets of this kind. None if it can't.

    The losses of PyTorch and diffnet for labels and for numbers are known, as modules, as functions and as `partial`
    with keyword arguments.
    """
    of_numbers = targets.is_floating_point()
    if isinstance(loss, MaskedLoss):
        return RowLoss(loss, math.nan if of_numbers else -1, "", lambda targets, rows: loss.divisor(targets))
    function, options = _call_of(loss)
    learned = any(isinstance(value, Tensor) and value.requires_grad for value in options.values())
    if function is None or learned or {"size_average", "reduce"} & options.keys():
        return None
    reduction = options.get("reduction", "mean")
    by_rows: Loss = partial(function, **{**options, "reduction": "none"})
    reduction_of_rows = "mean" if reduction == "none" else reduction
    count: Callable[[Tensor, Tensor], Tensor] | None = None if reduction == "sum" else lambda targets, rows: rows
    if function not in _OF_LABELS:
        # The weights of PyTorch's losses of numbers have a row for each of the batch.
        return None if options.get("weight") is not None else RowLoss(by_rows, None, reduction_of_rows, count)
    defaults = _defaults(function)
    label, weights = (options.get(name, defaults.get(name)) for name in _OF_LABELS[function])
    if weights is not None and options.get("label_smoothing"):
        return None  # PyTorch reads back which labels count
    if function is cross_entropy:
        return RowLoss(loss, label, "mean", count)
    if "reduction" not in defaults or (not of_numbers and reduction != "none"):
        if reduction != "mean" or function in _DICE:
            return RowLoss(loss, label)
        return RowLoss(loss, label, "", lambda targets, rows: counted_weight(targets, label, weights))
    return RowLoss(by_rows, None if of_numbers else label, reduction_of_rows, count)  # of probabilities, or of rows


def _call_of(loss: Loss) -> tuple[Function | None, Mapping[str, Any]]:
    """The function that a loss calls, with its keyword arguments. None if it is not known."""
    options: Mapping[str, Any] = {}
    function: Any = loss
    if isinstance(loss, nn.Module):
        function = None if "forward" in vars(loss) else _MODULES.get(type(loss))
        names = () if function is None else _defaults(function)
        options = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    elif isinstance(loss, partial) and not loss.args:
        function, options = loss.func, loss.keywords
    is_known = any(function is each for each in (*_OF_LABELS, *_OF_NUMBERS.values()))  # it may have no hash
    return (function, options) if is_known else (None, {})


@cache
def _defaults(function: Function) -> dict[str, Any]:
    """The defaults of the parameters of a function, by their names."""
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
