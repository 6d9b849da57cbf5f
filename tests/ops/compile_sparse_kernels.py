"""Compile every sparse and block-sparse kernel for a Hopper GPU, without a GPU.

A kernel that Triton's interpreter runs may still fail to compile. test_sparse_compilation.py runs this script in a
process without the interpreter. For each launched kernel, it prints the name, the dtype, the bytes of spilled registers
and the bytes of shared memory.
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
from diffnet.ops.block_sparse.pattern import BlockArrays, block_arrays
from diffnet.ops.block_sparse.reference import AttentionInputs
from diffnet.ops.implicit import kernels as implicit_kernels
from diffnet.ops.implicit.reference import System
from diffnet.ops.sparse import sddmm_kernels, softmax_kernels, spmm_kernels
from diffnet.ops.sparse.pattern import csr_arrays

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _spilled(binary: bytes) -> int:
    """Return the bytes of a thread's stack, where spilled registers go."""
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
    spmm_kernels.spmm(csr, values[:1], x)
    spmm_kernels.spmm(csr, values, x)
    spmm_kernels.spmm(turned, values, g, True, order)
    sddmm_kernels.sddmm(csr, g, x)
    sddmm_kernels.sddmm(csr, g[:1], x)
    softmax_kernels.softmax(csr, values, values > 0, 0.5)
    softmax_kernels.softmax_backward(csr, values, values, 0.5)


def launch_solver(pattern: Pattern, channels: int) -> None:
    pattern, _ = pattern.with_row_order(torch.arange(pattern.columns))
    diagonal, time = torch.ones(pattern.columns), torch.ones(channels)
    u, bound = torch.ones(pattern.columns, channels), torch.ones(1, channels)
    matrix = csr_arrays(pattern, True), torch.ones(pattern.nnz), diagonal, diagonal, time
    for ptr in ([0, pattern.columns], [0, 3, pattern.columns]):
        implicit_kernels.iteration(System(*matrix, torch.tensor(ptr)), u, u, u, bound)(bound)


def launch_blocks(pattern: BlockPattern, channels: int, dtype: torch.dtype) -> None:
    heads, rows, columns = pattern.shape
    arrays = BlockArrays(*block_arrays(pattern))
    structure = arrays.indptr, arrays.indices
    scores = torch.randn(1, *pattern.values_shape).to(dtype)
    query, key = (torch.randn(1, heads, n, channels).to(dtype) for n in (rows, columns))
    mask, keys, sums = scores[0] > 0, torch.ones(1, columns, dtype=torch.bool), torch.zeros(1, heads, rows)
    block_kernels.sdd(*structure, query, key, pattern.block)
    block_kernels.dsd(*structure, scores, key, rows)
    block_kernels.dsd(*structure, scores, query, columns, arrays.order)
    block_kernels.softmax(*structure, scores, scores[0].float(), keys, mask, 0.5, rows, columns)
    block_kernels.softmax_backward(structure[0], scores, scores, 0.5)
    inputs = AttentionInputs(query, key, key, keys, mask, 0.5, pattern.block)
    attention_kernels.attention(arrays, inputs)
    attention_kernels.attention_backward(arrays, inputs, query, sums, query)


def launch_all(dtype: torch.dtype) -> None:
    lengths = torch.tensor([200, 7, 7])  # the first is long
    indices = torch.cat([torch.arange(n) for n in lengths]).int()
    launch_csr(Pattern.from_row_lengths(lengths, indices, 208), 128, dtype)
    for block in (16, 128):
        pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), block)
        launch_blocks(pattern, 64, dtype)
    # The compiler treats an argument of 1 as a constant.
    launch_csr(Pattern.vector(torch.tensor([0]), 1), 1, dtype)
    launch_blocks(BlockPattern.from_mask(torch.ones(1, 1, dtype=torch.bool), 16, 1, 1), 1, dtype)


def report(name: str, options: dict[str, Any], compiled: Any) -> None:
    if name == "spmm_forward_rows_kernel":
        # Triton hoists the maximum of a loop-carried value out of the loop. The lengths of the first rows would then
        # bound those of all others.
        ahead_of_the_loop = compiled.asm["ttgir"].partition("scf.for")[0]
        assert "tt.reduce" not in ahead_of_the_loop, name
    print(name, dtype, _spilled(compiled.asm["cubin"]), compiled.metadata.shared, flush=True)


os.environ.pop("TRITON_INTERPRET", None)
compile_only(90, report)
torch.backends.cuda.matmul.fp32_precision = "tf32"
for dtype in (torch.bfloat16, torch.float32):
    launch_all(dtype)
implicit_kernels.interpreted = lambda tensor: False  # use the tiles of a GPU
for channels in (128, 1):
    launch_solver(Pattern.from_row_lengths(torch.full((208,), 7), torch.arange(7).repeat(208).int(), 208), channels)
