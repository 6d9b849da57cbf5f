"""Block-sparse products and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.benchmarks.harness.peers import both_passes, on_kernels, where_implemented
from diffnet.benchmarks.harness.registry import Case, Options, Run, Unavailable, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.ops import BlockPattern, block_attention, block_matmul, block_softmax


def random_layout(blocks: int, density: float, device: torch.device) -> Tensor:
    """A random bool tensor (blocks, blocks), True at a share `density` of its entries."""
    count = max(1, round(density * blocks * blocks))
    mask = torch.zeros(blocks * blocks, dtype=torch.bool)
    mask[torch.randperm(blocks * blocks, generator=torch.Generator().manual_seed(0))[:count]] = True
    return mask.reshape(blocks, blocks).to(device)


@benchmark("block-matmul", x="density", metrics=("TFLOP/s",))
def matmul_cases(options: Options) -> Iterator[Case]:
    """Products (N, N) × (N, N) with one block-sparse matrix among the three; N is `width`, rounded up to blocks."""
    on_gpu = options.device.type == "cuda"
    # On the CPU, kernels are interpreted, so only one small layout is measured.
    blocks, densities = ((64, 128), (0.05, 0.1, 0.2, 0.3, 0.5)) if on_gpu else ((64,), (0.3,))
    whole_blocks = tuple(128 * math.ceil(n / 128) for n in options.widths or (4096,))
    default = ("bf16",) if on_gpu else ("fp32",)
    sizes = replace(options, widths=whole_blocks, vertices=(0,))  # a product has no vertices
    for size in sweep(sizes, dtypes=default):
        n, kind = size.width, size.kind
        x, y = (torch.randn(1, n, n, device=size.device).to(kind.storage) for _ in range(2))
        for block in blocks:
            for density in densities:
                pattern = BlockPattern.from_mask(random_layout(n // block, density, size.device), block)
                pattern.blocks.prepare()
                entries = pattern.blocks.nnz * block * block
                for mode, peers in _products(pattern, x, y).items():
                    yield Case(
                        {"mode": mode, "dtype": size.dtype, "block": block, "width": n, "density": density},
                        {**peers, "triton": on_kernels(size.device, peers["triton"])},
                        flops=2.0 * entries * n,
                        bytes=float(kind.bytes * (entries + 2 * n * n)),
                        kind=kind,
                    )


def _products(pattern: BlockPattern, x: Tensor, y: Tensor) -> dict[str, dict[str, Run]]:
    """Peers by mode. The letters of a mode say which of the output and the two factors are sparse (s) or dense (d)."""
    values = torch.randn(pattern.values_shape, device=x.device).to(x.dtype)
    bsr, dense = pattern.to_torch(values), pattern.to_dense(values)[0]
    return {
        "dsd": {
            "triton": partial(block_matmul, pattern, values, x, "dsd", backend="triton"),
            "torch-bsr": where_implemented(partial(torch.matmul, bsr, x[0])),
            "torch-bsr-triton": partial(_bsr_dense_mm, bsr, x[0]),
            "dense": partial(torch.matmul, dense, x[0]),
        },
        "dds": {
            "triton": partial(block_matmul, pattern, x, values, "dds", backend="triton"),
            "dense": partial(torch.matmul, x[0], dense),
        },
        "sdd": {
            "triton": partial(block_matmul, pattern, x, y, "sdd", backend="triton"),
            "dense": partial(torch.matmul, x[0], y[0]),
        },
    }


def _bsr_dense_mm(bsr: Tensor, x: Tensor) -> Tensor:
    """PyTorch's own Triton kernel for BSR matrices."""
    if not x.is_cuda:
        raise Unavailable("torch.sparse._triton_ops needs a GPU")
    from torch.sparse._triton_ops import bsr_dense_mm

    out: Tensor = bsr_dense_mm(bsr, x)
    return out


@benchmark("block-attention", x="density")
def attention_cases(options: Options) -> Iterator[Case]:
    """Attention with a block-sparse layout, forward and backward; `vertices` is the length."""
    on_gpu = options.device.type == "cuda"
    # On the CPU, kernels are interpreted, so sizes are small.
    heads, width, block = (8, 64, 128) if on_gpu else (2, 16, 16)
    densities, default = ((0.05, 0.1, 0.2), ("bf16",)) if on_gpu else ((0.2,), ("fp32",))
    lengths = tuple(block * math.ceil(n / block) for n in options.vertices or (16_384 if on_gpu else 64,))
    for size in sweep(replace(options, vertices=lengths, widths=(width,)), dtypes=default):
        n = size.vertices
        given = torch.randn(3, heads, n, width, device=size.device).to(size.storage).requires_grad_()
        for density in densities:
            layout = random_layout(n // block, density, size.device)
            layout.fill_diagonal_(True)
            pattern = BlockPattern.from_mask(layout.expand(heads, -1, -1), block, n, n)
            pattern.blocks.prepare()
            forwards: dict[str, Callable[[], Tensor]] = {
                "triton": partial(_fused, pattern, given),
                "triton-three-kernels": partial(_in_three_steps, pattern, given),
                "flex": _flex_attention(layout, given, block),
                "dense": partial(_dense, given),
            }
            for step, peers in both_passes(size.device, forwards, [given], ("triton", "triton-three-kernels")):
                yield Case(
                    {"pass": step, "dtype": size.dtype, "block": block, "vertices": n, "density": density}, peers
                )


def _fused(pattern: BlockPattern, given: Tensor) -> Tensor:
    return block_attention(pattern, *given, backend="triton")


def _in_three_steps(pattern: BlockPattern, given: Tensor) -> Tensor:
    query, key, value = given
    scores = block_matmul(pattern, query, key, "sdd", transpose_b=True, backend="triton")
    weights = block_softmax(pattern, scores, scale=query.shape[-1] ** -0.5, backend="triton")
    return block_matmul(pattern, weights, value, "dsd", backend="triton")


def _dense(given: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*given[:, None])


def _flex_attention(layout: Tensor, given: Tensor, block: int) -> Callable[[], Tensor]:
    """FlexAttention with the layout as its block mask, compiled in the first call."""
    ready: list[Callable[[], Tensor]] = []

    def run() -> Tensor:
        if not given.is_cuda:
            raise Unavailable("FlexAttention is compared on a GPU")
        if not ready:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            def joined(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
                return layout[row // block, column // block]

            n = len(layout) * block
            mask = create_block_mask(joined, None, None, n, n, device="cuda", BLOCK_SIZE=block)
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, dynamic=False)
            query, key, value = given[:, None]
            ready.append(lambda: compiled(query, key, value, block_mask=mask))
        return ready[0]()

    return run
