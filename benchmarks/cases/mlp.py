"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from diffnet.benchmarks.cases.spectral import VERTICES, WIDTHS
from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import backward_of, compiled, forget_compiled, leaf, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.mlp import MLP


@benchmark("mlp", metrics=("GB/s",))
def mlp_cases(options: Options) -> Iterator[Case]:
    """The MLP 3C → C → C → C on [x, x_d, f] with dropout and residual, and all of its gradients."""
    device = options.device
    for dtype in options.dtypes or ("bf16",):
        kind = arithmetic(dtype)
        for c in options.widths or WIDTHS:
            for v in options.vertices or VERTICES:
                forget_compiled()
                layers = MLP([3 * c, c, c, c], dropout=0.5, backend="torch").to(device, kind.storage)
                fused = MLP([3 * c, c, c, c], dropout=0.5, backend="triton")
                for name, layer in layers.named_children():  # both share the weights
                    fused.add_module(name, layer)
                x, diffused, features = (leaf(v, c, device=device, dtype=kind.storage) for _ in range(3))
                leaves = [x, diffused, features, *layers.parameters()]
                plain = partial(_plain, layers)
                forwards = {
                    "eager": partial(plain, x, diffused, features),
                    "triton": partial(fused, [x, diffused, features], x),
                }
                if options.compile:
                    forwards["compiled"] = partial(compiled(plain), x, diffused, features)
                for step, flops, columns in (("forward", 10.0 * c * c, 4), ("backward", 20.0 * c * c, 7)):
                    peers = {n: f if step == "forward" else backward_of(f, leaves) for n, f in forwards.items()}
                    peers["triton"] = on_kernels(device, peers["triton"])
                    moved = float(kind.bytes * v * c * columns)  # of a kernel that keeps nothing between the layers
                    with matmul_precision(kind.tf32):
                        yield Case(
                            {"pass": step, "dtype": dtype, "width": c, "vertices": v},
                            peers,
                            flops=v * flops,
                            bytes=moved,
                            kind=kind,
                        )


def _plain(layers: MLP, x: Tensor, diffused: Tensor, features: Tensor) -> Tensor:
    return layers([x, diffused, features], x)
