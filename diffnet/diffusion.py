"""Diffusion with a learned time per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffnet.geometry import Operators
from diffnet.ops import Backend, diffuse, from_spectral, to_spectral


class LearnedTimeDiffusion(nn.Module):
    """Heat diffusion of each channel for its own learned time (Sharp et al. 2022, "Learned Diffusion").

    channels: C. Times start at 0, in squared units of the positions.
    backend: "torch", "triton", or "auto": Triton kernels on a GPU, see `ops.backend`
    """

    def __init__(self, channels: int, backend: Backend = "auto") -> None:
        super().__init__()
        self.backend: Backend = backend
        self.time = nn.Parameter(torch.zeros(channels))

    def coefficients(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) diffused, as coefficients (B, K, C) in the eigenbasis."""
        o, time = operators, self.learned_time()
        spectrum = to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, self.backend)
        return diffuse(spectrum, o.evals, time.clamp(min=0), self.backend)

    def learned_time(self) -> nn.Parameter:
        """(C,); in training at least 0"""
        if self.training:
            keep_nonnegative(self.time)
        return self.time

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)"""
        coefficients = self.coefficients(x, operators)
        return from_spectral(coefficients, operators.evecs, operators.ptr, operators.lengths, self.backend)


def keep_nonnegative(time: nn.Parameter) -> None:
    """Projected gradient descent: a step that overshot 0 comes back to it, and the next gradient counts whole."""
    with torch.no_grad():
        time.clamp_(min=0)
