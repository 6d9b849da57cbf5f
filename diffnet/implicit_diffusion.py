"""Diffusion with a learned time per channel that needs no eigenbasis."""

from __future__ import annotations

from torch import Tensor

from diffnet.diffusion import LearnedTimes, current_time
from diffnet.geometry import Operators
from diffnet.ops import Backend, implicit_diffusion
from diffnet.ops.common.checks import check_count
from diffnet.options import InitialTimes


class ImplicitDiffusion(LearnedTimes):
    """One implicit Euler step of heat diffusion, (M + t_c L) u_c = M x_c, for a learned time t_c per channel.

    The systems are solved by conjugate gradients. All frequencies take part, so operators with K = 0 are enough. This
    step damps a frequency λ by 1/(1 + tλ); spectral diffusion of the same time damps it by exp(−tλ).

    Source: Sharp et al. 2022, "Learned Diffusion", direct implicit timestep.

    Args:
        channels: C.
        initial_times: see `LearnedTimeDiffusion`.
        tolerance, max_iterations, check_every: see `ops.implicit_diffusion`.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    Raises ValueError for options out of range.
    """

    def __init__(
        self,
        channels: int,
        *,
        tolerance: float = 1e-6,
        max_iterations: int = 1000,
        check_every: int = 8,
        backend: Backend = "auto",
        initial_times: InitialTimes = "zero",
    ) -> None:
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance should be above 0 and below 1, got {tolerance}")
        super().__init__(channels, backend, initial_times)
        check_count("max_iterations", max_iterations, 1)
        check_count("check_every", check_every, 0)
        self.tolerance, self.max_iterations, self.check_every = tolerance, max_iterations, check_every

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)"""
        return implicit_diffusion(
            x,
            current_time(self).clamp(min=0),
            operators.laplacian,
            operators.mass,
            operators.ptr,
            operators.lengths,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
            check_every=self.check_every,
            backend=self.backend,
        )
