"""Block-sparse products and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.benchmarks.cases.sparse import where_implemented
from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import backward_of, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, Unavailable, benchmark
from diffnet.ops import BlockPattern, block_attention, block_matmul, block_softmax


def random_layout(blocks: int, density: float, device: torch.device) -> Tensor:
    """(blocks, blocks) bool with so large a share of True."""
    count = max(1, round(density * blocks * blocks))
    mask = torch.zeros(blocks * blocks, dtype=torch.bool)
    mask[torch.randperm(blocks * blocks, generator=torch.Generator().manual_seed(0))[:count]] = True
    return mask.reshape(blocks, blocks).to(device)


@benchmark("block-matmul", x="density", metrics=("TFLOP/s",))
def matmul_cases(options: Options) -> Iterator[Case]:
    """Products of size (N, N) × (N, N) with one block-sparse matrix among the three; N is `width`, in whole blocks."""
    device, on_gpu = options.device, options.device.type == "cuda"
    for dtype in options.dtypes or (("bf16",) if on_gpu else ("fp32",)):
        kind = arithmetic(dtype)
        for n in options.widths or (4096,):
            n = 128 * math.ceil(n / 128)
            x, y = (torch.randn(1, n, n, device=device).to(kind.storage) for _ in range(2))
            for block in (64, 128) if on_gpu else (64,):  # kernels are interpreted there
                for density in (0.05, 0.1, 0.2, 0.3, 0.5) if on_gpu else (0.3,):
                    pattern = BlockPattern.from_mask(random_layout(n // block, density, device), block)
                    pattern.blocks.prepare()
                    values = torch.randn(pattern.values_shape, device=device).to(kind.storage)
                    bsr, dense = pattern.to_torch(values), pattern.to_dense(values)[0]
                    products: dict[str, dict[str, Callable[[], object]]] = {
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
                    for mode, peers in products.items():
                        peers["triton"] = on_kernels(device, peers["triton"])
                        flops = 2.0 * pattern.blocks.nnz * block * block * n
                        moved = float(kind.bytes * (pattern.blocks.nnz * block * block + 2 * n * n))
                        with matmul_precision(kind.tf32):
                            yield Case(
                                {"mode": mode, "dtype": dtype, "block": block, "width": n, "density": density},
                                peers,
                                flops=flops,
                                bytes=moved,
                                kind=kind,
                            )


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
    device, on_gpu = options.device, options.device.type == "cuda"
    heads, width, block = (8, 64, 128) if on_gpu else (2, 16, 16)  # kernels are interpreted there
    for dtype in options.dtypes or (("bf16",) if on_gpu else ("fp32",)):
        kind = arithmetic(dtype)
        for n in options.vertices or (16_384 if on_gpu else 64,):
            n = block * math.ceil(n / block)
            given = torch.randn(3, heads, n, width, device=device).to(kind.storage).requires_grad_()
            for density in (0.05, 0.1, 0.2) if on_gpu else (0.2,):
                layout = random_layout(n // block, density, device)
                layout.fill_diagonal_(True)
                pattern = BlockPattern.from_mask(layout.expand(heads, -1, -1), block, n, n)
                pattern.blocks.prepare()

                def three_kernels(pattern: BlockPattern = pattern, given: Tensor = given) -> Tensor:
                    query, key, value = given
                    scores = block_matmul(pattern, query, key, "sdd", transpose_b=True, backend="triton")
                    weights = block_softmax(pattern, scores, scale=width**-0.5, backend="triton")
                    return block_matmul(pattern, weights, value, "dsd", backend="triton")

                def dense(given: Tensor = given) -> Tensor:
                    return F.scaled_dot_product_attention(*given[:, None])

                def one_kernel(pattern: BlockPattern = pattern, given: Tensor = given) -> Tensor:
                    return block_attention(pattern, *given, backend="triton")

                forwards = {
                    "triton": one_kernel,
                    "triton-three-kernels": three_kernels,
                    "flex": _flex_attention(layout, given, block),
                    "dense": dense,
                }
                for step in ("forward", "backward"):
                    runs = {k: f if step == "forward" else backward_of(f, [given]) for k, f in forwards.items()}
                    for name in ("triton", "triton-three-kernels"):
                        runs[name] = on_kernels(device, runs[name])
                    parameters = {"pass": step, "dtype": dtype, "block": block, "vertices": n, "density": density}
                    yield Case(parameters, runs)


def _flex_attention(layout: Tensor, given: Tensor, block: int) -> Callable[[], Tensor]:
    """FlexAttention with this layout as its block mask, compiled in the first call."""
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
