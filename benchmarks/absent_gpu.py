"""A GPU that need not be there, for Triton's compiler."""

from __future__ import annotations

from typing import Any


class AbsentGPU:
    """The part of a driver of Triton that compilation needs.

    Its number is its compute capability, because Triton keeps the compiled kernels of each number apart.

    amd: the architecture of a GPU of AMD, such as "gfx942", or "" for one of NVIDIA
    """

    def __init__(self, capability: int, amd: str = "") -> None:
        self.capability = capability
        self.amd = amd

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self.amd, 64) if self.amd else GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0
