"""Compile every sparse and block-sparse kernel for a Hopper GPU, with no GPU: what Triton's interpreter takes may still
fail to compile.

Run by test_sparse_compilation.py in a process of its own, without the interpreter. Prints, for each kernel that was
launched, its name, dtype, registers that were spilled and shared memory in bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diffnet.ops import BlockPattern, Pattern
from diffnet.ops.block_sparse import attention_kernels
from diffnet.ops.block_sparse import kernels as block_kernels
from diffnet.ops.sparse import kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NoGPU:
    """All that compiling asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


run = JITFunction.run


def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled = run(self, *arguments, grid=grid, warmup=True, **options)
    print(self.__name__, dtype, _spilled(compiled.asm["cubin"]), compiled.metadata.shared, flush=True)
    return compiled


def _spilled(binary: bytes) -> int:
    """Bytes of a thread's stack."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        shown = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", shown)
    assert found is not None, shown
    return int(found[1])


def launch_all(dtype: torch.dtype) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    # Row 0 is long.
    pattern = Pattern.from_row_lengths(
        torch.tensor([200, 7, 7]), torch.cat([torch.arange(200), *[torch.arange(7)] * 2]).int(), 208
    )
    indptr, indices, pieces = pattern.indptr, pattern.indices, pattern.long_pieces
    transposed, order = pattern.transpose
    values, x, g = random(2, pattern.nnz), random(1, 208, 128), random(2, 3, 128)
    kernels.spmm(indptr, indices, pieces, values[:1], x)
    kernels.spmm(indptr, indices, pieces, values, x)
    kernels.spmm(transposed.indptr, transposed.indices, pieces, values, g, True, order)
    kernels.sddmm(indptr, indices, pieces, g, x)
    kernels.sddmm(indptr, indices, pieces, g[:1], x)
    kernels.softmax(indptr, pieces, values, values > 0, 0.5)
    kernels.softmax_backward(indptr, pieces, values, values, 0.5)
    for block in (16, 64, 128):
        blocks = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), block)
        structure = blocks.blocks.indptr, blocks.blocks.indices
        scores, dense = random(1, *blocks.values_shape), random(1, 1, 2 * block, 64)
        mask, keys, order = scores[0] > 0, torch.ones(1, 2 * block, dtype=torch.bool), blocks.blocks.transpose[1]
        block_kernels.sdd(*structure, dense, dense, block)
        block_kernels.dsd(*structure, scores, dense, 2 * block)
        block_kernels.dsd(*structure, scores, dense, 2 * block, order)
        block_kernels.softmax(*structure, scores, scores[0].float(), keys, mask, 0.5, 1, 2 * block, 2 * block)
        block_kernels.softmax_backward(structure[0], scores, scores, 0.5)
        sums = torch.zeros(1, 1, 2 * block)
        given = dense, dense, dense, keys, mask
        attention_kernels.attention(*structure, *given, 0.5, block)
        attention_kernels.attention_backward(*structure, *structure, order, *given, sums, sums, dense, 0.5, block)


os.environ.pop("TRITON_INTERPRET", None)
driver.set_active(NoGPU())
JITFunction.run = compile_only
torch.backends.cuda.matmul.fp32_precision = "tf32"
for dtype in (torch.bfloat16, torch.float32):
    launch_all(dtype)
