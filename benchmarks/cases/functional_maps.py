"""Functional maps between shapes, and maps of their points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffnet import Operators, functional_map, point_map, soft_functional_map
from diffnet.benchmarks.harness.peers import both_passes, leaf
from diffnet.benchmarks.harness.registry import Case, Options, Run, Unavailable, benchmark
from diffnet.benchmarks.harness.sweep import Size, sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.ops import functional_map as functional_map_of_coefficients, nearest_neighbors, soft_map
from diffnet.ops.functional_maps.op import resolvent
from diffnet.train.correspondence.maps import point_map_of

K = 200
PAIRS = (1, 8, 32)
TEMPERATURE = 0.07


@benchmark("functional-map", x="pairs", metrics=("ms", "MB"))
def functional_map_cases(options: Options) -> Iterator[Case]:
    """Functional maps of many pairs with the resolvent regularizer, forward and backward, in wall-clock time.

    The second peer inverts the matrices of row 0 of all pairs, then of row 1, and so on. The third one stores the
    matrices of all rows. Both compute in float32, ours in float64. `width` is the number of features.
    """
    k, device = options.k or K, options.device
    pairs = PAIRS if device.type == "cuda" else PAIRS[:1]
    sizes = replace(options, vertices=(0,))  # coefficients have no vertices
    for size in sweep(sizes, dtypes=("fp32",), widths=(256,)):
        for count in pairs:
            a, b = (leaf(count, k, size.width, device=device, dtype=torch.float32) for _ in range(2))
            evals = [torch.rand(count, k, device=device).cumsum(1) for _ in range(2)]
            solvers = {"diffnet": functional_map_of_coefficients, "loop over rows": row_by_row, "all rows": _all_rows}
            peers: dict[str, Run] = {name: partial(_gradients, f, a, b, *evals) for name, f in solvers.items()}
            yield Case({"dtype": size.dtype, "k": k, "width": size.width, "pairs": count}, peers, wall_clock=True)


def _gradients(solve: Callable[..., Tensor], a: Tensor, b: Tensor, evals_a: Tensor, evals_b: Tensor) -> object:
    return torch.autograd.grad(solve(a, b, evals_a, evals_b).square().sum(), [a, b])


def row_by_row(a: Tensor, b: Tensor, evals_a: Tensor, evals_b: Tensor) -> Tensor:
    """The published recipe: a loop over the rows, with an inverse matrix of each pair."""
    gram, right, penalty = a @ a.mT, b @ a.mT, 100 * resolvent(evals_a, evals_b, 0.5)
    rows = []
    for i in range(b.shape[1]):
        inverse = torch.inverse(gram + torch.diag_embed(penalty[:, i]))
        rows.append(inverse @ right[:, i, :, None])
    return torch.cat(rows, 2).mT


def _all_rows(a: Tensor, b: Tensor, evals_a: Tensor, evals_b: Tensor) -> Tensor:
    matrices = (a @ a.mT)[:, None] + torch.diag_embed(100 * resolvent(evals_a, evals_b, 0.5))
    return torch.linalg.solve(matrices, (b @ a.mT)[..., None])[..., 0]


@benchmark("soft-map", metrics=("ms", "MB"))
def soft_map_cases(options: Options) -> Iterator[Case]:
    """The soft map of as many points on both sides applied to K functions, forward and backward.

    The second peer stores the table of all pairs. The third one is PyTorch's memory-efficient attention.
    """
    k = options.k or K
    for size in sweep(options, dtypes=("fp32", "tf32"), widths=(256,), vertices=(5_000, 20_000, 100_000)):
        x, y = (_unit_features(size) for _ in range(2))
        values = torch.randn(size.vertices, k, device=size.device)
        forwards: dict[str, Callable[[], Tensor]] = {
            "diffnet": partial(soft_map, y, x, values, TEMPERATURE),
            "table": partial(_table, y, x, values),
            "attention": partial(_attention, y, x, values),
        }
        for step, peers in both_passes(size.device, forwards, [x, y]):
            flops = 2.0 * size.vertices**2 * (size.width + k) * (1 if step == "forward" else 2)
            yield Case({"pass": step, **size.parameters(k=k)}, peers, flops=flops)


def _unit_features(size: Size) -> Tensor:
    return F.normalize(torch.randn(size.vertices, size.width, device=size.device), dim=1).requires_grad_()


def _table(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.mT / TEMPERATURE, 1) @ values


def _attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    if not queries.is_cuda:
        raise Unavailable("memory-efficient attention needs a GPU")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        query, key, value = (t[None, None] for t in (queries, keys, values))
        return F.scaled_dot_product_attention(query, key, value, scale=1 / TEMPERATURE)


@benchmark("nearest-neighbors", metrics=("ms", "MB"))
def nearest_neighbor_cases(options: Options) -> Iterator[Case]:
    """The nearest of as many points for each point, in K dimensions. The second peer stores all distances."""
    k = options.k or K
    for size in sweep(options, dtypes=("fp32",), widths=(0,), vertices=(5_000, 20_000, 100_000)):
        queries, points = torch.randn(2, size.vertices, k, device=size.device)
        peers: dict[str, Run] = {
            "diffnet": partial(nearest_neighbors, queries, points),
            "cdist": partial(_by_distances, queries, points),
        }
        yield Case(
            {"dtype": size.dtype, "k": k, "vertices": size.vertices},
            peers,
            flops=2.0 * size.vertices**2 * k,
            bytes=8.0 * size.vertices * (k + 1),
            kind=size.kind,
        )


def _by_distances(queries: Tensor, points: Tensor) -> Tensor:
    return torch.cdist(queries, points).argmin(1)


@benchmark("match", metrics=("ms", "MB"))
def match_cases(options: Options) -> Iterator[Case]:
    """Two meshes matched vertex by vertex from features and operators, in wall-clock time.

    The first peer goes through the functional map of the features, and the second through that of their soft map. The
    third goes through the nearest orthogonal map of the first, as `diffnet match` does, and the fourth through ZoomOut,
    as `diffnet match --zoomout` does.
    """
    k = options.k or K
    for size in sweep(options, dtypes=("fp32",), widths=(256,), vertices=(5_000, 100_000)):
        a, b = (synthetic_operators(size.vertices, k, size.device) for _ in range(2))
        x, y = (_unit_features(size).detach() for _ in range(2))
        peers: dict[str, Run] = {
            "functional map": partial(_match, functional_map, x, y, a, b),
            "soft map": partial(_match, soft_functional_map, x, y, a, b),
            "functional map, orthogonal": partial(_match_of_command, x, y, a, b, zoomout=False),
            "functional map, ZoomOut": partial(_match_of_command, x, y, a, b, zoomout=True),
        }
        yield Case(size.parameters(k=k), peers, wall_clock=True)


def _match(mapped: Callable[..., Tensor], x: Tensor, y: Tensor, a: Operators, b: Operators) -> Tensor:
    return point_map(mapped(x, y, a, b), a, b)


def _match_of_command(x: Tensor, y: Tensor, a: Operators, b: Operators, zoomout: bool) -> Tensor:
    return point_map_of(functional_map(x, y, a, b), a, b, zoomout)
