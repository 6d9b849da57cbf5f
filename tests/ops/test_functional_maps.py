"""Functional maps: the solve and its derivatives in float64, soft maps, nearest neighbors, ZoomOut and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from float64 import DEVICE, check, random, relative
from refusals import refused
from scipy.spatial.distance import cdist
from torch import Tensor

from diffnet import ops
from diffnet.ops.functional_maps import kernels, nearest, reference, rows

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

# Pairs, eigenpairs of a and of b, channels. 33 and 70 don't divide the blocks of the factorization.
SIZES = [(1, 1, 1, 1), (1, 5, 3, 8), (3, 33, 20, 40), (2, 70, 33, 80)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(pairs: int, k_a: int, k_b: int, channels: int) -> list[Tensor]:
    """Coefficients of features (P, K, C) and eigenvalues (P, K) that grow as those of surfaces, in float64."""
    evals = [(random(pairs, k, seed=i).abs() * 10).cumsum(1) - 0.1 for i, k in ((1, k_a), (2, k_b))]
    return [random(pairs, k_a, channels, seed=3), random(pairs, k_b, channels, seed=4), *evals]


def penalties(evals_a: Any, evals_b: Any, regularizer: str, gamma: float = 0.5) -> Any:
    """The regularizers as the design page writes them, for one pair in NumPy: (K_b, K_a)."""
    out = np.empty((len(evals_b), len(evals_a)))
    top = max(evals_a.max(), evals_b.max(), 0) or 1.0
    for i, second in enumerate(evals_b):
        for j, first in enumerate(evals_a):
            g1, g2 = (max(x, 0) / top for x in (first, second))
            g1, g2 = g1**gamma, g2**gamma
            re = g2 / (g2**2 + 1) - g1 / (g1**2 + 1)
            im = 1 / (g2**2 + 1) - 1 / (g1**2 + 1)
            out[i, j] = re**2 + im**2 if regularizer == "resolvent" else (first - second) ** 2
    return out


def row_by_row(a: Any, b: Any, evals_a: Any, evals_b: Any, regularizer: str, weight: float) -> Any:
    """The map of one pair in NumPy, a system for each row."""
    d = weight * penalties(evals_a, evals_b, regularizer)
    return np.stack([np.linalg.solve(a @ a.T + np.diag(d[i]), a @ b[i]) for i in range(len(b))])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 31, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inverse_factors(size: int, dtype: torch.dtype, device: str) -> None:
    """The kernel, on panels with more rows than columns. A matrix that isn't positive definite disturbs no other."""
    panel = random(7, size + 6, size)
    panel[:, :size] = panel[:, :size] @ panel[:, :size].mT + torch.eye(size)
    panel[3, size - 1, size - 1] = -1.0
    expected = torch.linalg.inv(torch.linalg.cholesky_ex(panel[:, :size])[0])
    wanted = torch.arange(7) != 3
    for module in (kernels, reference):
        found = module.inverse_factors(panel.to(device, dtype)).cpu()
        assert relative(found[wanted], expected[wanted]) < (1e-12 if dtype == torch.float64 else 1e-5)
        assert found[3].isnan().any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 5, 3, 8), (1, 33, 2, 40)])
def test_both_backends(size: tuple[int, int, int, int], backend: Any) -> None:
    given = [x.float() for x in inputs(*size)]
    found = []
    for dtype, device, chosen in ((torch.float32, DEVICE, backend), (torch.float64, "cpu", "torch")):
        leaves = [x.to(device, dtype).requires_grad_() for x in given[:2]]
        c = ops.functional_map(*leaves, *(x.to(device, dtype) for x in given[2:]), backend=chosen)
        grads = torch.autograd.grad(c.square().sum(), leaves)
        found.append([c.detach().cpu(), *(g.cpu() for g in grads)])
    assert all(relative(ours, expected) < 1e-6 for ours, expected in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("regularizer", ["resolvent", "squared_difference"])
@pytest.mark.parametrize("size", [*SIZES, (1, 300, 2, 310), (2, 9, 8, 1)])  # the last: fewer features than eigenpairs
def test_values(size: tuple[int, int, int, int], regularizer: Any, device: str) -> None:
    given = inputs(*size)
    c = ops.functional_map(*(x.to(device) for x in given), regularizer=regularizer, weight=0.7).cpu()
    assert c.shape == (size[0], size[2], size[1])
    assert c.dtype == torch.float64
    for p in range(size[0]):
        expected = row_by_row(*(x[p].numpy() for x in given), regularizer, 0.7)
        assert relative(c[p], torch.from_numpy(expected)) < 1e-10


@pytest.mark.parametrize("regularizer", ["resolvent", "squared_difference"])
def test_default_weights(regularizer: Any) -> None:
    given = inputs(2, 4, 5, 6)
    weight = {"resolvent": 100.0, "squared_difference": 1e-3}[regularizer]
    out = ops.functional_map(*given, regularizer=regularizer)
    torch.testing.assert_close(out, ops.functional_map(*given, regularizer=regularizer, weight=weight), rtol=0, atol=0)


@pytest.mark.parametrize("regularizer", ["resolvent", "squared_difference"])
def test_derivatives(regularizer: Any) -> None:
    """In every argument, for pairs of different sizes, and twice in the features."""
    a, b, evals_a, evals_b = inputs(2, 4, 3, 5)
    leaves = [t.requires_grad_() for t in (a, b, evals_a.abs(), evals_b.abs(), torch.tensor(0.7).double())]
    leaves.append(torch.tensor(0.6, dtype=torch.float64, requires_grad=True))

    def mapped(*given: Tensor) -> Tensor:
        *four, weight, gamma = given
        return ops.functional_map(*four, regularizer=regularizer, weight=weight, gamma=gamma, k_a=[3, 4], k_b=[3, 2])

    assert torch.autograd.gradcheck(mapped, leaves)
    fixed = [t.detach() for t in leaves[2:]]
    assert torch.autograd.gradgradcheck(lambda a, b: mapped(a, b, *fixed), leaves[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_the_solve(size: tuple[int, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd through all systems at once, with several chunks that end within a pair."""
    pairs, k, count, channels = size
    kind = torch.device(device).type
    monkeypatch.setitem(rows.MAX_FACTOR_BYTES, kind, 7 * 8 * k * (k + 1))
    a, penalty, right = random(pairs, k, channels), random(pairs, count, k).abs() + 0.1, random(pairs, count, k, seed=1)

    def at_once(a: Tensor, penalty: Tensor, right: Tensor) -> Tensor:
        return torch.linalg.solve((a @ a.mT)[:, None] + torch.diag_embed(penalty), right[..., None])[..., 0]

    solve = lambda a, *rest: rows.solve_rows(a @ a.mT, *rest)  # noqa: E731
    check(solve, at_once, [a, penalty, right], torch.float64, device)


def test_float32_features_are_solved_in_float64() -> None:
    """Also where A Aᵀ is singular in float32: features with norms from 1 to 1e-5."""
    a, b, evals_a, evals_b = (x.float() for x in inputs(1, 20, 20, 30))
    a, b = (x * torch.logspace(0, -5, 20)[:, None] for x in (a, b))
    c = ops.functional_map(a, b, evals_a, evals_b, weight=1e-12)
    given = (x[0].double().numpy() for x in (a, b, evals_a, evals_b))
    assert c.dtype == torch.float32
    assert relative(c[0], torch.from_numpy(row_by_row(*given, "resolvent", 1e-12))) < 1e-6


def test_gradients_of_one_feature_are_finite() -> None:
    given = inputs(2, 9, 8, 1)
    given[0].requires_grad_()
    (grad,) = torch.autograd.grad(ops.functional_map(*given).sum(), given[0])
    assert grad.isfinite().all()


@pytest.mark.parametrize("padding", [0.0, float("nan")])
@pytest.mark.parametrize("regularizer", ["resolvent", "squared_difference"])
def test_pairs_of_different_sizes(regularizer: Any, padding: float) -> None:
    """Each pair gives what it gives alone, and zeros in the padding, whose values don't matter."""
    k_a, k_b = [4, 7, 1], [6, 2, 3]
    given = inputs(3, 7, 6, 8)
    for x, counts in zip(given, (k_a, k_b, k_a, k_b), strict=True):
        for p, count in enumerate(counts):
            x[p, count:] = padding
        x.requires_grad_()
    c = ops.functional_map(*given, regularizer=regularizer, k_a=k_a, k_b=k_b)
    for p in range(3):
        alone = ops.functional_map(
            *(x[p : p + 1, :n] for x, n in zip(given, (k_a[p], k_b[p]) * 2, strict=True)), regularizer=regularizer
        )[0]
        torch.testing.assert_close(c[p, : k_b[p], : k_a[p]], alone, rtol=1e-10, atol=1e-12)
        assert (c[p, k_b[p] :] == 0).all()
        assert (c[p, :, k_a[p] :] == 0).all()
    gradients = torch.autograd.grad(c.square().sum(), given[:2])
    for grad, counts in zip(gradients, (k_a, k_b), strict=True):
        assert grad.isfinite().all()
        assert all((grad[p, n:] == 0).all() for p, n in enumerate(counts))


def test_no_pairs_and_no_features() -> None:
    assert ops.functional_map(*(x[:0] for x in inputs(2, 3, 4, 5))).shape == (0, 4, 3)
    a, b, evals_a, evals_b = inputs(2, 3, 4, 5)
    assert (ops.functional_map(a[..., :0], b[..., :0], evals_a + 1, evals_b + 40, weight=1.0) == 0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"regularizer": "slanted"}, "regularizer should be one of resolvent, squared_difference, got 'slanted'"),
        ({"weight": -1.0}, "weight should be finite and at least 0, got -1"),
        ({"weight": float("nan")}, "weight should be finite and at least 0, got nan"),
        ({"weight": "heavy"}, "weight should be a number or a tensor of shape"),
        ({"gamma": 0.0}, "gamma should be finite and above 0, got 0"),
        ({"k_a": [4]}, r"k_a should be 2 integers from 1 to 3, got \[4\]"),
        ({"k_b": [0, 4]}, r"k_b should be 2 integers from 1 to 4, got \[0, 4\]"),
        ({"b": torch.zeros(2, 4, 6).double()}, r"b should have shape \(2, K_b, 5\), shape is \(2, 4, 6\)"),
        ({"evals_a": torch.zeros(3).double()}, r"evals_a should have shape \(2, 3\), shape is \(3,\)"),
        ({"a": torch.full((2, 3, 5), torch.nan).double()}, r"a should be finite, got nan at index \[0, 0, 0\]"),
        ({"a": torch.zeros(2, 3, 5).double(), "weight": 0.0}, "row 0 of functional map 0: its system is singular"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    named = dict(zip(("a", "b", "evals_a", "evals_b"), inputs(2, 3, 4, 5), strict=True))
    refused(
        TypeError if changed.get("weight") == "heavy" else ValueError, message, ops.functional_map, **(named | changed)
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_of_32_pairs() -> None:
    """Forward and backward at K = 200 take at most 3 GB."""
    given = [x.float().cuda() for x in inputs(32, 200, 200, 256)]
    given[0].requires_grad_()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.functional_map(*given).sum().backward()
    assert torch.cuda.max_memory_allocated() - held < 3e9


def dense_soft_map(queries: Tensor, keys: Tensor, values: Tensor, temperature: Tensor) -> Tensor:
    return torch.softmax(queries @ keys.mT / temperature, 1) @ values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (70, 63, 5, 3), (130, 2, 2, 4)])
def test_soft_maps(size: tuple[int, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and all gradients, the temperature's included, in several chunks of queries."""
    monkeypatch.setattr(nearest, "MAX_ENTRIES", {"cuda": 0, "cpu": 0})
    monkeypatch.setattr(nearest, "MIN_ROWS", {"cuda": 32, "cpu": 32})
    n, m, c, k = size
    given = [random(n, c), random(m, c, seed=1), random(m, k, seed=2), torch.tensor(0.3).double()]
    check(ops.soft_map, dense_soft_map, given, torch.float64, device)


def test_sharp_soft_maps_do_not_overflow() -> None:
    """Scores of thousands: the values of the nearest keys."""
    keys = torch.nn.functional.normalize(random(40, 8), dim=1).float()
    out = ops.soft_map(keys.flip(0), keys, torch.arange(40.0)[:, None], temperature=1e-4)
    torch.testing.assert_close(out[:, 0], torch.arange(40.0).flip(0), rtol=0, atol=1e-3)


def test_low_precision_is_computed_in_float32() -> None:
    given = [random(*shape, seed=i).bfloat16() for i, shape in enumerate([(9, 4), (8, 4), (8, 3)])]
    out = ops.soft_map(*given, temperature=0.07)
    expected = dense_soft_map(*(x.double() for x in given), torch.tensor(0.07))
    assert out.dtype == torch.float32
    assert relative(out, expected) < 1e-5


def test_soft_maps_store_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of both passes is a chunk."""
    monkeypatch.setattr(nearest, "MAX_ENTRIES", {"cpu": 0})
    monkeypatch.setattr(nearest, "MIN_ROWS", {"cpu": 16})
    largest = LargestTensor()
    queries, keys, values = (random(n, 4, seed=n).requires_grad_() for n in (500, 400, 400))
    with largest:
        ops.soft_map(queries, keys, values, 0.5).sum().backward()
    assert largest.numel == 16 * 400


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), torch.tensor(0.0)])
def test_wrong_temperatures(temperature: Any) -> None:
    with pytest.raises(ValueError, match="temperature should be finite and above 0"):
        ops.soft_map(random(3, 2), random(4, 2), random(4, 1), temperature)


def test_features_whose_products_overflow() -> None:
    large = 1e20 * torch.eye(40)
    with pytest.raises(
        ValueError, match=r"keysᵀ / temperature should be finite in torch.float32.* reach 1e\+20 and keys"
    ):
        ops.soft_map(large, large, large, 0.07)
    assert ops.soft_map(large.double(), large, torch.eye(40), 0.07).equal(torch.eye(40).double())
    with pytest.raises(ValueError, match=r"squared length of queries should be finite, got inf at index \[0\]"):
        ops.nearest_neighbors(large, large)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dimensions", [1, 3, nearest.MAX_TREE_DIMENSIONS, nearest.MAX_TREE_DIMENSIONS + 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nearest_neighbors(dimensions: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also far from the origin, where inner products lose digits."""
    monkeypatch.setattr(nearest, "MAX_ENTRIES", {"cuda": 0, "cpu": 0})
    queries, candidates = (random(n, dimensions, seed=n).to(dtype) + 100 for n in (150, 63))
    found = ops.nearest_neighbors(queries.to(device), candidates.to(device))
    assert found.dtype == torch.int64
    assert np.array_equal(found.cpu(), cdist(queries, candidates).argmin(1))


@pytest.mark.parametrize("device", DEVICES)
def test_nearest_neighbors_without_tf32(device: str) -> None:
    """Where it is allowed. The setting is restored."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        queries, candidates = (random(n, 200, seed=n).float() * 1e-2 + random(1, 200).float() for n in (999, 2000))
        found = ops.nearest_neighbors(queries.to(device), candidates.to(device))
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert np.array_equal(found.cpu(), cdist(queries, candidates).argmin(1))


def basis(vertices: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random functions (V, K) that are orthonormal for random areas (V,)."""
    mass = random(vertices, seed=seed).abs() + 0.1
    q = torch.linalg.qr(random(vertices, k, seed=seed + 1))[0]
    return q / mass.sqrt()[:, None], mass


def renumbered(k: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A basis of a, the same of b with vertices in another order, areas of b, and the true vertices of a."""
    (evecs, mass), order = basis(40, k, 0), torch.randperm(40)
    return evecs, evecs[order], mass[order], order


def test_maps_of_points_and_back() -> None:
    evecs_a, evecs_b, mass_b, order = renumbered()
    c = ops.functional_map_from_points(order, evecs_a, evecs_b, mass_b)
    torch.testing.assert_close(c, torch.eye(6).double())
    assert torch.equal(ops.point_map(c, evecs_a, evecs_b), order)
    assert torch.equal(ops.point_map(c[:5, :4], evecs_a, evecs_b), cdist_map(c[:5, :4], evecs_a, evecs_b))


def cdist_map(c: Tensor, evecs_a: Tensor, evecs_b: Tensor) -> Tensor:
    return torch.cdist(evecs_b[:, : len(c)], evecs_a[:, : c.shape[1]] @ c.mT).argmin(1)


def test_maps_of_points_in_the_commute_time_distance() -> None:
    """Of maps that don't keep areas, and against all distances."""
    (evecs_a, _), matches, evals = basis(40, 6, 0), torch.arange(55) % 40, torch.arange(6).double()
    mixed = torch.eye(6).double() + 0.5 * random(6, 6)
    # These functions on b are those on a, read at the matches and mixed. So C is the inverse.
    c, evecs_b = mixed.inverse(), evecs_a[matches] @ mixed
    assert torch.equal(ops.point_map(c, evecs_a, evecs_b, evals), matches)
    assert not torch.equal(ops.point_map(c, evecs_a, evecs_b), matches)
    few = c[:5, :4]
    weights = torch.tensor([0.75, 1, 2, 3]).double().rsqrt()  # the limit is a fourth of the largest eigenvalue in use
    expected = torch.cdist(evecs_b[:, :5] @ few * weights, evecs_a[:, :4] * weights).argmin(1)
    assert torch.equal(ops.point_map(few, evecs_a, evecs_b, evals), expected)
    for columns in (0, 1):  # all eigenvalues are 0, or there are none
        assert ops.point_map(c[:, :columns], evecs_a, evecs_b, evals).shape == (55,)
    with pytest.raises(ValueError, match=r"evals_a should have shape \(6,\), shape is \(5,\)"):
        ops.point_map(c, evecs_a, evecs_b, evals[:5])


def test_functional_maps_from_some_correspondences() -> None:
    """Least squares, with more and with exactly as many points as eigenvectors, whatever the map."""
    (evecs_a, _), (evecs_b, _), vertices = basis(40, 6, 0), basis(30, 5, 7), torch.tensor([3, 9, 2, 39, 20, 11, 5])
    for count in (5, 7):
        of_a, of_b = vertices[:count], (vertices[:count] + 1) % 30
        c = ops.functional_map_from_correspondences(of_a, of_b, evecs_a, evecs_b)
        expected = np.linalg.lstsq(evecs_b[of_b].numpy(), evecs_a[of_a].numpy(), rcond=None)[0]
        np.testing.assert_allclose(c, expected, rtol=1e-9)
    dependent = evecs_b[:, [0, 1, 1, 2, 0]]
    c = ops.functional_map_from_correspondences(vertices, vertices % 30, evecs_a, dependent)
    np.testing.assert_allclose(c, np.linalg.pinv(dependent[vertices % 30].numpy()) @ evecs_a[vertices].numpy(), 1e-9)
    with pytest.raises(ValueError, match="5 eigenvectors need as many correspondences, got 4"):
        ops.functional_map_from_correspondences(vertices[:4], vertices[:4] % 30, evecs_a, evecs_b)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("k", "step"), [(None, 1), (7, 2), (4, 1), (8, 100)])
def test_zoomout(k: int | None, step: int, keep: bool) -> None:
    """From a map of 4 rough coefficients to the true map, and against a loop."""
    evecs_a, evecs_b, mass_b, order = renumbered(8)
    # Eigenfunctions of lower frequency tell more about the points.
    evecs_a, evecs_b = (x * torch.logspace(0, -0.5, 8) for x in (evecs_a, evecs_b))
    start = torch.eye(4).double() + 0.02 * random(4, 4)
    c = ops.zoomout(start, evecs_a, evecs_b, mass_b, k=k, step=step, keep=keep)
    expected, size, last = start, 4, k or 8
    while True:
        matches = cdist_map(expected, evecs_a, evecs_b)
        size = min(size + step, last)
        expected = evecs_b[:, :size].mT @ (mass_b[:, None] * evecs_a[matches, :size])
        if keep:
            expected[:4, :4] = start
        if size == last:
            break
    torch.testing.assert_close(c, expected)
    assert c.shape == (last, last)
    assert torch.equal(cdist_map(c, evecs_a, evecs_b), order)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"k": 3}, "k should be from 4"), ({"k": 9}, "to 8 eigenvectors, got 9"), ({"step": 0}, "at least 1, got 0")],
)
def test_zoomout_refuses(changed: dict[str, int], message: str) -> None:
    evecs_a, evecs_b, mass_b, _ = renumbered(8)
    refused(ValueError, message, ops.zoomout, torch.eye(4).double(), evecs_a, evecs_b, mass_b, **changed)


def test_vertices_out_of_range() -> None:
    evecs_a, evecs_b, mass_b, order = renumbered()
    with pytest.raises(IndexError, match="matches should be from 0 to 39, got 40 at index 0"):
        ops.functional_map_from_points(torch.where(order == order[0], 40, order), evecs_a, evecs_b, mass_b)


LOSSES: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], float]] = [
    (ops.orthogonality_loss, (torch.tensor([[[0.0, -1.0], [1.0, 0.0]]]),), 0.0),
    (ops.orthogonality_loss, (torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]]),), 3.0 / 2),
    (ops.bijectivity_loss, (torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[0.5], [3.0]]])), 37.0),
    (ops.coupling_loss, (torch.ones(2, 2, 3), torch.zeros(2, 2, 3)), 6.0),
]


@pytest.mark.parametrize(("loss", "maps", "expected"), LOSSES)
def test_losses(loss: Callable[..., Tensor], maps: tuple[Tensor, ...], expected: float) -> None:
    """Squared Frobenius norms by hand, averaged over pairs."""
    assert loss(*maps).item() == pytest.approx(expected)
    assert torch.autograd.gradcheck(loss, [(m.double() + 0.1).requires_grad_() for m in maps])


def test_losses_of_pairs_of_different_sizes() -> None:
    c = torch.zeros(2, 3, 3)
    c[0, :2, :2], c[1] = torch.eye(2), torch.eye(3)
    assert ops.orthogonality_loss(c).item() == 0.5
    assert ops.orthogonality_loss(c, k_a=[2, 3]).item() == 0
    assert ops.bijectivity_loss(c, c, k_a=[2, 3]).item() == 0
