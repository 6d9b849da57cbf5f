"""Diffusion with a learned time per channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from diffnet.arguments import check_eigenpairs, in_features_dtype, is_sharded, refuses_fields
from diffnet.geometry import Operators
from diffnet.geometry.errors import refuses
from diffnet.ops import Backend, diffuse, from_spectral, to_spectral
from diffnet.ops.common.checks import check_count
from diffnet.ops.common.compiler import under_transforms
from diffnet.options import InitialTimes

# The ends of the spread for positions of unit size: the squared length of a short edge, and of the whole surface.
MIN_TIME, MAX_TIME = 1e-4, 1.0


class LearnedTimes(nn.Module):
    """Base class of diffusion with a learned time for each of C channels."""

    def __init__(self, channels: int, backend: Backend, initial_times: InitialTimes) -> None:
        super().__init__()
        check_count("channels", channels, 1)
        self.backend: Backend = backend
        self.time = nn.Parameter(starting_times(channels, initial_times))

    def learned_time(self) -> Tensor:
        """Return the times (C,) with which the layer diffuses: a copy, in which negative times are 0."""
        return self.time.clamp(min=0)

    def extra_repr(self) -> str:
        return str(self.time.numel())


class LearnedTimeDiffusion(LearnedTimes):
    """Heat diffusion of each channel for its own learned time, in the eigenbasis.

    Source: Sharp et al. 2022, "Learned Diffusion", spectral acceleration.

    Args:
        channels: C.
        initial_times: "zero", or "spread" for times of 1e-4 to 1 with equal ratios. Their unit is the squared unit of
            the positions, and the spread is meant for positions of unit size.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    Raises ValueError for fewer than 1 channel and for other initial times.
    """

    @refuses(C_inout="channels", method='ImplicitDiffusion(channels) for method="implicit_dense"')
    def __init__(self, channels: int, backend: Backend = "auto", initial_times: InitialTimes = "zero") -> None:
        super().__init__(channels, backend, initial_times)

    def coefficients(self, x: Tensor, operators: Operators) -> Tensor:
        """Diffuse x (V, C) and return its coefficients in the eigenbasis, (B, K, C).

        Raises ValueError for operators with k = 0.
        """
        check_eigenpairs(operators)
        o, time = operators, current_time(self)
        spectrum = to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, self.backend)
        return diffuse(spectrum, o.evals, time.clamp(min=0), self.backend)

    @refuses_fields
    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)"""
        o = operators
        diffused = from_spectral(self.coefficients(x, o), o.evecs, o.ptr, o.lengths, self.backend)
        return in_features_dtype(diffused, x)


def starting_times(channels: int, initial_times: InitialTimes) -> Tensor:
    """The times (C,) before training. Raises ValueError for an unknown choice."""
    if initial_times not in get_args(InitialTimes):
        raise ValueError(f"initial_times should be one of {', '.join(get_args(InitialTimes))}, got {initial_times!r}")
    if initial_times == "zero":
        return torch.zeros(channels)
    # torch.logspace imports SymPy on the meta device, on which checkpoints are read.
    ratio, last = MAX_TIME / MIN_TIME, max(channels - 1, 1)
    return torch.tensor([MIN_TIME * ratio ** (i / last) for i in range(channels)])


def current_time(module: Any) -> Tensor:
    """Return `time` of a module. In training, negative ones are set to 0 in place first, see `keep_nonnegative`.

    In eval mode, they stay as they are. A transform of torch.func allows no such write. Negative times stay then, too,
    and values and gradients are those at 0. Under FSDP they stay until the end of the backward pass, because each pass
    has copies of the weights.
    """
    time: Tensor = module.time
    if not module.training:
        return time
    if not (is_sharded(module) or under_transforms()):
        keep_nonnegative([time])
        return time
    result = time - time.detach().clamp(max=0)
    if is_sharded(module) and result.requires_grad:
        after_backward = torch.autograd.Variable._execution_engine.queue_callback  # as FSDP does
        result.register_hook(  # type: ignore[no-untyped-call]
            lambda _: after_backward(lambda: keep_nonnegative([module.time]))
        )
    return result


def keep_nonnegative(times: Sequence[Tensor]) -> None:
    """Set negative times to 0 in place. A rank does so in its share of a distributed tensor.

    This is projected gradient descent: if an optimizer step overshoots 0, the next step starts from 0.

    The write goes through `time.data`, which autograd does not record as a modification. Several forward passes before
    one backward pass are therefore allowed. They all see the same times: only the first can find a negative one.
    """
    values: list[Any] = [time.data for time in times]
    shares = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    if len(shares) == 1:
        shares[0].clamp_(min=0)
    elif shares:
        torch._foreach_clamp_min_(shares, 0)
