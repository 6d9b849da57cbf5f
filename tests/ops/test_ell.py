"""ELL and hybrid patterns against dense matrices, and their arguments: shapes, dtypes, devices and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import sparse_cases
import torch
from float64 import DEVICE, random
from refusals import refused
from sparse_cases import (
    backends,
    dense_of,
    dense_softmax,
    ints,
    small_pieces as small_pieces,  # a fixture
    strided,
)
from torch import Tensor

from diffnet.ops import Backend, EllPattern, HybridPattern, Pattern, sparse_softmax
from diffnet.ops.sparse import hybrid as hybrid_module
from diffnet.ops.sparse.hybrid import bucket_widths

pytestmark = pytest.mark.usefixtures("one_thread")


def random_pattern(rows: int, columns: int) -> Pattern:
    """Return a pattern with rows of 0, 2, 3 and 7 entries, and a full row."""
    rng = np.random.default_rng(rows)
    mask = np.zeros((rows, columns), dtype=bool)
    for i in range(rows):
        mask[i, rng.permutation(columns)[: (0, 2, 3, 7)[i % 4]]] = True
    mask[rows - 1 :] = True
    found = scipy.sparse.csr_matrix(mask)
    return Pattern(torch.from_numpy(found.indptr), torch.from_numpy(found.indices), columns)


SHAPES = [(13, 20), (1, 9), (9, 1), (6, 0), (0, 5)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@shapes
def test_ell(shape: tuple[int, int]) -> None:
    pattern = random_pattern(*shape)
    converted, entries = EllPattern.from_pattern(pattern)
    again, there = converted.csr[0], converted.there
    assert torch.equal(again.indptr, pattern.indptr)
    assert torch.equal(again.indices, pattern.indices)
    values, x = random(2, pattern.nnz), random(shape[1], 3, seed=1)
    places = torch.full((2, *entries.shape), torch.nan, dtype=torch.float64)  # values at unused places are ignored
    places[:, there] = values
    assert torch.equal(entries[there], torch.arange(pattern.nnz))
    torch.testing.assert_close(converted.matmul(places, x), dense_of(pattern, values) @ x)
    wider, _ = EllPattern.from_pattern(pattern, 25)
    assert wider.indices.shape == (shape[0], 25)
    assert torch.equal(wider.csr[0].indices, pattern.indices)
    turned, sources = converted.transpose
    assert turned.shape == pattern.transpose[0].shape
    flipped = places.flatten(-2)[..., sources.clamp(min=0)]
    torch.testing.assert_close(
        turned.matmul(flipped, random(shape[0], 3)), dense_of(pattern, values).mT @ random(shape[0], 3)
    )
    assert torch.equal(sources >= 0, turned.there)
    assert converted.transpose is converted.transpose  # made once


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets cost nearly nothing, and rows of 7 are long."""
    monkeypatch.setattr(hybrid_module, "BUCKET_COST", 1)
    monkeypatch.setattr(hybrid_module, "PIECE", 5)


@shapes
def test_hybrid(shape: tuple[int, int], small_buckets: None) -> None:
    """Rows are taken bucket by bucket, and then those of the rest."""
    pattern = random_pattern(*shape)
    hybrid = HybridPattern.from_pattern(pattern)
    if shape == (13, 20):
        assert hybrid.widths == (0, 2, 3)
        lengths = pattern.row_lengths[hybrid.grouped.rows_by_length.long()].tolist()
        assert lengths[-4:] == [7, 7, 7, 20]
        assert [sum(n > width for width in hybrid.widths) for n in lengths] == sorted(
            sum(n > width for width in hybrid.widths) for n in lengths
        )
    assert hybrid.shape == pattern.shape
    values, x = random(2, pattern.nnz), random(shape[1], 3, seed=1)
    out = hybrid.matmul(values, x)
    torch.testing.assert_close(out, dense_of(pattern, values) @ x)
    turned, order = hybrid.transpose
    assert turned.shape == pattern.shape[::-1]
    assert torch.equal(dense_of(turned.pattern, values[:, order]), dense_of(pattern, values).mT)
    assert hybrid.transpose is hybrid.transpose  # made once


@dataclass(frozen=True)
class Format:
    """An ELL or hybrid pattern, and the conversion of values from and to a CSR pattern."""

    made: EllPattern | HybridPattern
    there: Tensor | None

    @classmethod
    def of(cls, name: str, pattern: Pattern) -> Format:
        if name == "hybrid":
            return cls(HybridPattern.from_pattern(pattern.to(DEVICE)), None)
        made, entries = EllPattern.from_pattern(pattern.to(DEVICE))
        return cls(made, entries.cpu() >= 0)

    def places(self, values: Tensor, unused: float = torch.nan) -> Tensor:
        if self.there is None:
            return values
        out = values.new_full((*values.shape[:-1], *self.there.shape), unused)
        out[..., self.there] = values
        return out

    def entries(self, values: Tensor) -> Tensor:
        """Undo `places`, and check that unused places hold 0."""
        if self.there is None:
            return values
        assert torch.equal(values[..., ~self.there], torch.zeros_like(values[..., ~self.there]))
        return values[..., self.there]


formats = pytest.mark.parametrize("name", ["ell", "hybrid"])


def dense_sddmm(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.mT)[..., pattern.row_indices.long(), pattern.column_indices.long()]


@backends
@formats
@shapes
def test_operations(shape: tuple[int, int], name: str, backend: Backend, small_buckets: None) -> None:
    """Values and gradients, compared with dense float64. Values and gradients at unused places are NaN."""
    pattern = random_pattern(*shape)
    rows, columns = shape
    form = Format.of(name, pattern)
    made, nnz = form.made, pattern.nnz
    mask = random(3, nnz, seed=7) > -0.3
    shared = random(nnz, seed=8) > -0.3
    moved = {m: form.places(m, unused=True).to(DEVICE) for m in (mask, shared)}
    # (operation, the same on dense matrices, sparse inputs, dense inputs, whether the output is sparse)
    v, a, x = random(3, nnz), random(3, rows, 3), random(columns, 3)
    softmax, bias = partial(dense_softmax, pattern), [v, random(nnz, seed=1)]

    def biased(scores: Tensor, bias: Tensor, scale: Tensor, **options: Any) -> Tensor:
        return made.softmax(scores, scale=scale, bias=bias, **options)

    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor], list[Tensor], bool]] = [
        (made.matmul, lambda v, x: dense_of(pattern, v) @ x, [v], [x], False),
        (partial(made.matmul, transpose=True), lambda v, x: dense_of(pattern, v).mT @ x, [v], [a], False),
        (made.sddmm, partial(dense_sddmm, pattern), [], [a, random(columns, 3, seed=1)], True),
        (made.softmax, lambda s: softmax(s, 1.0, None), [v], [], True),
        (partial(made.softmax, scale=0.3, mask=moved[mask]), lambda s: softmax(s, 0.3, mask), [v], [], True),
        (partial(made.softmax, mask=moved[shared]), lambda s: softmax(s, 1.0, shared), [v], [], True),
        (biased, lambda s, b, t: softmax(t[..., None] * s + b, 1.0, None), bias, [random(3)], True),
    ]
    for operation, dense, sparse_inputs, dense_inputs, sparse_output in cases:
        expected = [x.float().double().requires_grad_() for x in (*sparse_inputs, *dense_inputs)]
        given = [form.places(x.float()).to(DEVICE).requires_grad_() for x in sparse_inputs]
        given += [x.float().to(DEVICE).requires_grad_() for x in dense_inputs]
        reference = dense(*expected)
        upstream = random(*reference.shape, seed=2).float()
        references = [reference, *torch.autograd.grad(reference, expected, upstream.double())]
        out = operation(*given, backend=backend)
        upstream = form.places(upstream) if sparse_output else upstream
        outs = [x.cpu().double() for x in (out, *torch.autograd.grad(out, given, upstream.to(DEVICE)))]
        sparse = [sparse_output, *(True for _ in sparse_inputs), *(False for _ in dense_inputs)]
        for found, wanted, is_sparse in zip(outs, references, sparse, strict=True):
            found = form.entries(found) if is_sparse else found
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, for lanes that are masked out
@backends
@formats
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_infinities_do_not_spread(poison: float, name: str, backend: Backend, small_buckets: None) -> None:
    """No row has an entry in the first or last column, the first row is empty, and rows have unused places."""
    indptr, indices = ints(0, 0, 2, 3, 3, 6), ints(1, 3, 2, 1, 2, 4)
    pattern = Pattern(indptr, indices, 6)
    form = Format.of(name, pattern)
    values = form.places(random(2, 6).float()).to(DEVICE).requires_grad_()
    x = random(6, 3, seed=1).float().to(DEVICE)
    x[[0, 5]] = poison
    y = random(5, 3, seed=2).float().to(DEVICE)
    y[[0, 3]] = poison
    x.requires_grad_()
    y.requires_grad_()
    product = form.made.matmul(values, x, backend=backend)
    turned = form.made.matmul(values, y, transpose=True, backend=backend)
    sampled = form.made.sddmm(y, x, backend=backend)
    assert all(out.isfinite().all() for out in (product, turned, sampled))
    assert torch.equal(product[:, [0, 3]], torch.zeros_like(product[:, [0, 3]]))
    # Gradients of empty rows may be infinite, too.
    upstream = torch.ones_like(product)
    upstream[:, [0, 3]] = poison
    for out, grad in ((product, upstream), (turned, torch.ones_like(turned)), (sampled, torch.ones_like(sampled))):
        for given in torch.autograd.grad(out, (values, x, y), grad, retain_graph=True, allow_unused=True):
            assert given is None or given.isfinite().all()


def test_a_hybrid_product_is_one_launch(small_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with several buckets, and one launch for a sampled product."""
    from diffnet.ops.sparse import spmm_kernels

    launches: list[str] = []

    class Counted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            launches.append(self.name)
            return self.kernel[grid]

    for name, kernel in vars(spmm_kernels).copy().items():
        if name.endswith("_kernel"):
            monkeypatch.setattr(spmm_kernels, name, Counted(name, kernel))
    pattern = random_pattern(13, 20)
    hybrid = HybridPattern.from_pattern(pattern.to(DEVICE))
    assert len(hybrid.widths) == 3
    values = random(2, pattern.nnz).float().to(DEVICE).requires_grad_()
    x = random(20, 3).float().to(DEVICE).requires_grad_()
    out = hybrid.matmul(values, x, backend="triton")
    assert launches == ["spmm_forward_rows_kernel"]
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert sorted(launches[1:]) == ["sddmm_forward_rows_kernel", "spmm_forward_rows_kernel"]
    launches.clear()
    hybrid.matmul(values, out, transpose=True, backend="triton")
    hybrid.sddmm(out, x, backend="triton")
    assert launches == ["spmm_forward_rows_kernel", "sddmm_forward_rows_kernel"]


def test_rows_are_taken_by_bucket(small_buckets: None) -> None:
    """Rows keep their order within a bucket. The rest is taken by length."""
    pattern = random_pattern(13, 20)
    hybrid = HybridPattern.from_pattern(pattern)
    assert hybrid.grouped.rows_by_length.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 12]
    assert hybrid.grouped is hybrid.grouped  # made once
    assert hybrid.grouped.transpose is pattern.transpose
    two = HybridPattern(pattern, (3, 7))
    assert two.grouped.rows_by_length.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 3, 7, 11, 12]
    assert len(HybridPattern(pattern, (20,)).grouped.rows_by_length) == 0  # the rows' own order
    stored, _ = pattern.with_row_order(torch.arange(13).flip(0))
    assert HybridPattern(stored, (3, 7)).grouped is stored


def cost(histogram: list[int], widths: tuple[int, ...]) -> float:
    """Return the cost that `bucket_widths` minimizes."""
    total = 0.0
    rest = sum(n * count for n, count in enumerate(histogram) if n > max(widths, default=-1))
    for n, count in enumerate(histogram):
        total += count * min((w for w in widths if w >= n), default=0)
    if rest:
        total += rest * hybrid_module.REST_COST + hybrid_module.BUCKET_COST
    return total + len(widths) * hybrid_module.BUCKET_COST


def test_buckets_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with trying all widths."""
    rng = np.random.default_rng(0)
    for bucket in (1, 20, 200):
        monkeypatch.setattr(hybrid_module, "BUCKET_COST", bucket)
        for _ in range(10):
            histogram = (rng.integers(0, 40, 9) * (rng.random(9) < 0.7)).tolist()
            found = tuple(bucket_widths(histogram))
            every = [c for n in range(10) for c in combinations(range(9), n)]
            assert cost(histogram, found) == pytest.approx(min(cost(histogram, c) for c in every))


def test_rows_of_meshes_are_in_buckets() -> None:
    """A few rows of thousands of entries are the rest."""
    histogram = [0] * 5001
    histogram[5:9] = [20_000, 60_000, 18_000, 2_000]
    assert bucket_widths(histogram)[-1] == 8
    histogram[5000] = 3
    assert bucket_widths(histogram)[-1] in (7, 8)
    assert bucket_widths([]) == []


def test_a_width_below_the_longest_row_is_refused() -> None:
    refused(ValueError, "20, got 4", EllPattern.from_pattern, random_pattern(13, 20), 4)


def test_strided_indices_become_contiguous() -> None:
    ell, _ = EllPattern.from_pattern(random_pattern(13, 20))
    for indices in (strided(ell.indices), ell.indices.T.contiguous().T):
        made = EllPattern(indices, 20)
        assert made.indices.is_contiguous()
        assert torch.equal(made.csr[0].indices, ell.csr[0].indices)
    assert EllPattern(ell.indices, 20).indices is ell.indices
    assert ell.csr is ell.csr  # made once


PATTERN = sparse_cases.random_pattern()  # (9, 6)
NNZ = PATTERN.nnz
ELL, ENTRIES = EllPattern.from_pattern(PATTERN)
WIDTH = ELL.indices.shape[1]
VALUES = {"ell": (9, WIDTH), "hybrid": (NNZ,)}  # the last dimensions of values


def made(name: str) -> Any:
    return EllPattern(ELL.indices.to(DEVICE), 6) if name == "ell" else HybridPattern.from_pattern(PATTERN.to(DEVICE))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


WRONG_MASKS = [
    pytest.param(lambda s: zeros(*s), "bool", id="float"),
    pytest.param(lambda s: np.ones(s, dtype=bool), "bool, got ndarray", id="array"),
    pytest.param(
        lambda s: zeros(*s[:-1], s[-1] + 1, dtype=torch.bool), r"mask should broadcast to \(2,", id="too long"
    ),
    pytest.param(lambda s: zeros(3, *s, dtype=torch.bool), r"mask should broadcast to \(2,", id="too many sets"),
    pytest.param(lambda s: zeros(1, 1, *s, dtype=torch.bool)[..., :0], "mask should broadcast", id="empty"),
    pytest.param(lambda s: torch.tensor(True, device=DEVICE), r"shape is \(\)", id="scalar"),
    pytest.param(lambda s: zeros(*s, dtype=torch.bool, device="meta"), "it is on meta", id="device"),
]


@backends
@pytest.mark.parametrize("name", ["ell", "hybrid", "csr"])
@pytest.mark.parametrize(("mask", "message"), WRONG_MASKS)
def test_wrong_masks_are_refused(
    mask: Callable[[tuple[int, ...]], Any], message: str, name: str, backend: Backend
) -> None:
    shape = VALUES.get(name, (NNZ,))
    softmax = partial(sparse_softmax, PATTERN.to(DEVICE)) if name == "csr" else made(name).softmax
    refused(ValueError, message, softmax, zeros(2, *shape), mask=mask(shape), backend=backend)


@backends
@pytest.mark.parametrize("name", VALUES)
def test_wrong_biases_and_scales_are_refused(name: str, backend: Backend) -> None:
    scores, shape = zeros(2, *VALUES[name]), VALUES[name]
    for bias in (zeros(*shape, dtype=torch.int64), zeros(3, *shape), zeros(*shape, device="meta"), [1.0]):
        refused((TypeError, ValueError), "bias", made(name).softmax, scores, bias=bias, backend=backend)
    for scale in (zeros(3), zeros(2, dtype=torch.int64), "1"):
        refused((TypeError, ValueError), "scale", made(name).softmax, scores, scale=scale, backend=backend)


@pytest.mark.usefixtures("small_pieces", "poisoned")
@backends
def test_masks_of_ell_broadcast(backend: Backend) -> None:
    """Over sets, rows and places."""
    scores = random(2, 3, 9, WIDTH).float()
    ell, pattern = made("ell"), PATTERN.to(DEVICE)
    for shape in [(9, WIDTH), (WIDTH,), (9, 1), (1, 1, 9, WIDTH), (2, 1, 9, WIDTH), (3, 1, WIDTH), (2, 3, 9, WIDTH)]:
        mask = random(*shape, seed=len(shape)) > -0.5
        out = ell.softmax(scores.to(DEVICE), mask=mask.to(DEVICE), backend=backend)
        whole = mask.expand(scores.shape)[..., ELL.there].to(DEVICE)
        expected = sparse_softmax(pattern, scores[..., ELL.there].to(DEVICE), mask=whole, backend=backend)
        torch.testing.assert_close(out[..., ELL.there], expected)


def indices(*rows_of_places: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(rows_of_places, dtype=dtype, device=DEVICE)


WRONG_ELL = {
    "list": ([[0, 1]], 3, TypeError, "indices should be a plain tensor, got list"),
    "array": (np.zeros((1, 2), dtype=np.int64), 3, TypeError, "got ndarray"),
    "none": (None, 3, TypeError, "got NoneType"),
    "parameter": (torch.nn.Parameter(indices([0, 1]), requires_grad=False), 3, TypeError, "got Parameter"),
    "float": (zeros(1, 2), 3, ValueError, r"2-D int32 or int64, got torch\.float32 of shape \(1, 2\)"),
    "bool": (zeros(1, 2, dtype=torch.bool), 3, ValueError, r"got torch\.bool"),
    "1-D": (ints(0, 1), 3, ValueError, r"2-D int32 or int64, got torch\.int64 of shape \(2,\)"),
    "3-D": (indices([0, 1])[None], 3, ValueError, r"of shape \(1, 1, 2\)"),
    "columns float": (indices([0, 1]), 5.0, TypeError, "columns should be an integer, got 5.0 of type float"),
    "columns bool": (indices([0, 0]), True, TypeError, "columns should be an integer, got True"),
    "columns tensor": (indices([0, 1]), torch.tensor(3), TypeError, "columns should be an integer"),
    "columns negative": (indices([-1, -1]), -2, ValueError, "columns should be at least 0, got -2"),
    "too large": (indices([0, 1], [0, 3]), 3, ValueError, "below columns, 3, .* got 3 at place 1 of row 1"),
    "too small": (indices([0, 1], [-2, -1]), 3, ValueError, "got -2 at place 0 of row 1"),
    "no columns": (indices([0, -1]), 0, ValueError, "below columns, 0, .* got 0 at place 0 of row 0"),
    "descending": (indices([0, 1], [2, 1]), 3, ValueError, "ascend within a row, got 2 before 1 in row 1"),
    "twice": (indices([0, 1, 2], [0, 2, 2]), 3, ValueError, "got column 2 twice in row 1"),
    "gap": (indices([0, 1, 2], [0, -1, 2]), 3, ValueError, "come last in a row, got −1 before 2 in row 1"),
}


@pytest.mark.parametrize("name", WRONG_ELL)
def test_wrong_ell_patterns_are_refused(name: str) -> None:
    given, columns, error, message = WRONG_ELL[name]
    refused(error, message, EllPattern, given, columns)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_right_ell_patterns_are_accepted(dtype: torch.dtype) -> None:
    for given in (indices([0, 2], [-1, -1], [1, -1], dtype=dtype), zeros(3, 0, dtype=dtype), zeros(0, 4, dtype=dtype)):
        assert EllPattern(given, 3).shape == (len(given), 3)
        assert EllPattern(given, np.int64(3)).shape == (len(given), 3)  # type: ignore[arg-type]
    assert EllPattern(indices([-1, -1]), 0).matmul(zeros(1, 2), zeros(0, 4)).shape == (1, 4)


def test_patterns_are_unchecked_on_request() -> None:
    """Without a check, the values are not read, as on the meta device."""
    assert EllPattern(indices([2, 0]), 1, check=False).columns == 1
    assert EllPattern(indices([2, 0]).to("meta"), 1).columns == 1


def test_from_pattern_refuses_other_arguments() -> None:
    for cls in (EllPattern, HybridPattern):
        refused(TypeError, "pattern should be a Pattern, got Tensor", cls.from_pattern, torch.eye(3))
    refused(TypeError, r"width should be an integer, got 9\.0", EllPattern.from_pattern, PATTERN, 9.0)


def test_wrong_hybrid_patterns_are_refused() -> None:
    refused(TypeError, "a Pattern, got Tensor", HybridPattern, torch.eye(3), (3,))
    refused(TypeError, "each width should be an integer, got 3.0", HybridPattern, PATTERN, (3.0,))
    refused(ValueError, r"ascend and be at least 0, got \(3, 2\)", HybridPattern, PATTERN, (3, 2))
    refused(ValueError, "ascend", HybridPattern, PATTERN, (2, 2))
    refused(ValueError, "at least 0", HybridPattern, PATTERN, (-1, 2))
