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
from no_gpu import compile_only

from diffnet.ops import BlockPattern, Pattern
from diffnet.ops.block_sparse import attention_kernels
from diffnet.ops.block_sparse import kernels as block_kernels
from diffnet.ops.implicit import kernels as conjugate_gradients
from diffnet.ops.sparse import kernels
from diffnet.ops.sparse.pattern import csr_arrays

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _spilled(binary: bytes) -> int:
    """Bytes of a thread's stack."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        shown = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", shown)
    assert found is not None, shown
    return int(found[1])


def launch_csr(pattern: Pattern, channels: int, dtype: torch.dtype) -> None:
    rows, columns = pattern.shape
    pattern, _ = pattern.with_row_order(torch.arange(rows))
    transposed, order = pattern.transpose
    csr, turned = csr_arrays(pattern, True), csr_arrays(transposed, True)
    values, x, g = (
        torch.randn(shape).to(dtype) for shape in ((2, pattern.nnz), (1, columns, channels), (2, rows, channels))
    )
    kernels.spmm(csr, values[:1], x)
    kernels.spmm(csr, values, x)
    kernels.spmm(turned, values, g, True, order)
    kernels.sddmm(csr, g, x)
    kernels.sddmm(csr, g[:1], x)
    kernels.softmax(csr, values, values > 0, 0.5)
    kernels.softmax_backward(csr, values, values, 0.5)


def launch_solver(pattern: Pattern, channels: int) -> None:
    pattern, _ = pattern.with_row_order(torch.arange(pattern.columns))
    diagonal, time = torch.ones(pattern.columns), torch.ones(channels)
    u, bound = torch.ones(pattern.columns, channels), torch.ones(1, channels)
    given = csr_arrays(pattern, True), torch.ones(pattern.nnz), diagonal, diagonal, time
    for ptr in ([0, pattern.columns], [0, 3, pattern.columns]):
        conjugate_gradients.iteration(*given, torch.tensor(ptr), u, u, u, bound)(bound)


def launch_blocks(pattern: BlockPattern, channels: int, dtype: torch.dtype) -> None:
    heads, rows, columns = pattern.shape
    structure, order = (pattern.blocks.indptr, pattern.blocks.indices), pattern.blocks.transpose[1]
    scores = torch.randn(1, *pattern.values_shape).to(dtype)
    query, key = (torch.randn(1, heads, n, channels).to(dtype) for n in (rows, columns))
    mask, keys, sums = scores[0] > 0, torch.ones(1, columns, dtype=torch.bool), torch.zeros(1, heads, rows)
    block_kernels.sdd(*structure, query, key, pattern.block)
    block_kernels.dsd(*structure, scores, key, rows)
    block_kernels.dsd(*structure, scores, query, columns, order)
    block_kernels.softmax(*structure, scores, scores[0].float(), keys, mask, 0.5, heads, rows, columns)
    block_kernels.softmax_backward(structure[0], scores, scores, 0.5)
    given = query, key, key, keys, mask
    attention_kernels.attention(*structure, *given, 0.5, pattern.block)
    attention_kernels.attention_backward(*structure, *structure, order, *given, query, sums, query, 0.5, pattern.block)


def launch_all(dtype: torch.dtype) -> None:
    lengths = torch.tensor([200, 7, 7])  # the first is long
    indices = torch.cat([torch.arange(n) for n in lengths]).int()
    launch_csr(Pattern.from_row_lengths(lengths, indices, 208), 128, dtype)
    for block in (16, 128):
        pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), block)
        launch_blocks(pattern, 64, dtype)
    # What is 1 is a constant to the compiler.
    launch_csr(Pattern.vector(torch.tensor([0]), 1), 1, dtype)
    launch_blocks(BlockPattern.from_mask(torch.ones(1, 1, dtype=torch.bool), 16, 1, 1), 1, dtype)


def report(name: str, options: dict[str, Any], compiled: Any) -> None:
    if name == "_spmm_rows":
        # Triton takes maxima of what a loop carries out of it; then the first rows' lengths would bound all others'.
        ahead_of_the_loop = compiled.asm["ttgir"].partition("scf.for")[0]
        assert "tt.reduce" not in ahead_of_the_loop, name
    print(name, dtype, _spilled(compiled.asm["cubin"]), compiled.metadata.shared, flush=True)


os.environ.pop("TRITON_INTERPRET", None)
compile_only(90, report)
torch.backends.cuda.matmul.fp32_precision = "tf32"
for dtype in (torch.bfloat16, torch.float32):
    launch_all(dtype)
conjugate_gradients.interpreted = lambda tensor: False  # for the tiles of a GPU
for channels in (128, 1):
    launch_solver(Pattern.from_row_lengths(torch.full((208,), 7), torch.arange(7).repeat(208).int(), 208), channels)
