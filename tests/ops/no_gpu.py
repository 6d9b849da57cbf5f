"""Triton's compiler for a GPU that need not be there. Use it in a process without the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diffnet.benchmarks.absent_gpu import AbsentGPU
from diffnet.benchmarks.shared_buffers import overwritten_buffers


def compile_only(capability: int, report: Callable[[str, dict[str, Any], Any], None]) -> None:
    """Make all later launches compile for a GPU and run nothing. They raise AssertionError, see `shared_buffers`.

    Args:
        capability: the compute capability, 90 for 9.0
        report: called with each kernel's name, the options of its launch, and the compiled kernel
    """
    run = JITFunction.run

    def compile_and_report(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        overwritten = overwritten_buffers(compiled.asm.get("ttgir", ""))
        assert not overwritten, f"{self.__name__} {options}: {overwritten} may be overwritten while they are multiplied"
        report(self.__name__, options, compiled)
        return compiled

    driver.set_active(AbsentGPU(capability))
    JITFunction.run = compile_and_report
