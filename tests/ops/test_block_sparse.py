"""Block-sparse products and softmax against dense ones in float64, on plain PyTorch and in Triton kernels (through its
interpreter where there is no GPU)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import DEVICE, check, random
from torch import Tensor

from diffnet.ops import BlockPattern, Pattern, block_attention, block_matmul, block_softmax

KINDS = [
    ("torch", torch.float64),
    ("triton", torch.float32),
    ("triton", torch.float16),
    pytest.param("triton", torch.bfloat16, marks=pytest.mark.gpu),  # the interpreter multiplies none
]
kinds = pytest.mark.parametrize(("backend", "dtype"), KINDS)
# (heads, rows, columns, block): sizes that the block divides and others, one block, and more than one step of 64.
SHAPES = [(2, 37, 50, 16), (3, 20, 9, 32), (1, 64, 130, 64), (1, 128, 128, 128)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels leave unwritten shows as NaN."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*arguments: object, **options: object) -> Tensor:
            out = allocate(*arguments, **options)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        return allocated

    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


def random_pattern(shape: tuple[int, int, int, int], seed: int = 0) -> BlockPattern:
    """A layout per head, with an empty block row and an empty block column where there are several."""
    heads, rows, columns, block = shape
    mask = random(heads, -(-rows // block), -(-columns // block), seed=seed) > -0.3
    mask[:, 0, 0] = True
    if mask.shape[1] > 2:
        mask[0, 1] = False
    if mask.shape[2] > 2:
        mask[-1, :, 1] = False
    return BlockPattern.from_mask(mask, block, rows, columns)


def flipped(x: Tensor, transpose: bool) -> Tensor:
    return x.mT if transpose else x


@kinds
@shapes
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_dense_times_dense(
    shape: tuple[int, int, int, int], backend: str, dtype: torch.dtype, transpose_a: bool, transpose_b: bool
) -> None:
    heads, rows, columns, _ = shape
    pattern = random_pattern(shape)
    moved = pattern.to(DEVICE)
    check(
        lambda a, b: block_matmul(
            moved, a, b, "sdd", transpose_a=transpose_a, transpose_b=transpose_b, backend=backend
        ),
        lambda a, b: pattern.sample(flipped(a, transpose_a) @ flipped(b, transpose_b)),
        [
            flipped(random(2, heads, rows, 21), transpose_a).contiguous(),
            flipped(random(2, heads, 21, columns, seed=1), transpose_b).contiguous(),
        ],
        dtype,
    )


@kinds
@shapes
@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sparse_and_dense(
    shape: tuple[int, int, int, int],
    backend: str,
    dtype: torch.dtype,
    mode: str,
    transpose_a: bool,
    transpose_b: bool,
) -> None:
    heads, rows, columns, _ = shape
    pattern = random_pattern(shape)
    moved = pattern.to(DEVICE)
    # What lies beyond the edge of a matrix must not count.
    values = random(2, *pattern.values_shape)
    if mode == "dsd":
        inner = rows if transpose_a else columns
        inputs = [values, flipped(random(2, heads, inner, 21, seed=1), transpose_b).contiguous()]
    else:
        inner = columns if transpose_b else rows
        inputs = [flipped(random(2, heads, 21, inner, seed=1), transpose_a).contiguous(), values]

    def reference(a: Tensor, b: Tensor) -> Tensor:
        a, b = (pattern.to_dense(a), b) if mode == "dsd" else (a, pattern.to_dense(b))
        return flipped(a, transpose_a) @ flipped(b, transpose_b)

    check(
        lambda a, b: block_matmul(moved, a, b, mode, transpose_a=transpose_a, transpose_b=transpose_b, backend=backend),
        reference,
        inputs,
        dtype,
    )


@kinds
@shapes
@pytest.mark.parametrize("extras", ["none", "bias", "keys", "attention", "all"])
def test_softmax(shape: tuple[int, int, int, int], backend: str, dtype: torch.dtype, extras: str) -> None:
    heads, rows, columns, _ = shape
    pattern = random_pattern(shape)
    moved, scale = pattern.to(DEVICE), -0.6
    bias = random(heads, rows + columns - 1, seed=2) if extras in ("bias", "all") else None
    keys = random(2, columns, seed=3) > -0.5 if extras in ("keys", "all") else None
    attention = random(heads, rows, columns, seed=4) > -0.5 if extras in ("attention", "all") else None
    if attention is not None:
        attention[:, 2] = False  # a row that looks at nothing
    there = pattern.to_dense(torch.ones(2, *pattern.values_shape)) > 0
    if keys is not None:
        there = there & keys[:, None, None, :]
    if attention is not None:
        there = there & attention

    def reference(scores: Tensor, table: Tensor | None = None) -> Tensor:
        full = scale * pattern.to_dense(scores)
        if table is not None:
            distance = torch.arange(columns) - torch.arange(rows)[:, None] + rows - 1
            full = full + table[:, distance]
        full = full.masked_fill(~there, -torch.inf)
        weights = torch.exp(full - full.amax(-1, keepdim=True).clamp(min=-1e300))
        return pattern.sample(weights / weights.sum(-1, keepdim=True).clamp(min=1e-300))

    def ours(scores: Tensor, table: Tensor | None = None) -> Tensor:
        return block_softmax(
            moved,
            scores,
            scale=scale,
            relative_bias=table,
            key_padding_mask=None if keys is None else keys.to(DEVICE),
            attention_mask=None if attention is None else attention.to(DEVICE),
            backend=backend,
        )

    inputs = [random(2, *pattern.values_shape)] + ([bias] if bias is not None else [])
    check(ours, reference, inputs, dtype)


@pytest.mark.parametrize(("backend", "dtype"), [*KINDS, ("torch", torch.bfloat16)])
@shapes
@pytest.mark.parametrize("masked", [False, True])
def test_attention(shape: tuple[int, int, int, int], backend: str, dtype: torch.dtype, masked: bool) -> None:
    heads, rows, columns, _ = shape
    pattern = random_pattern(shape)
    moved, scale = pattern.to(DEVICE), 0.3
    keys = random(2, columns, seed=3) > -0.5 if masked else None
    attention = random(heads, rows, columns, seed=4) > -0.5 if masked else None
    there = pattern.to_dense(torch.ones(2, *pattern.values_shape)) > 0
    if keys is not None and attention is not None:
        attention[:, 2] = False  # a row that looks at nothing
        there = there & keys[:, None, None, :] & attention

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full = (scale * q @ k.mT).masked_fill(~there, -torch.inf)
        weights = torch.exp(full - full.amax(-1, keepdim=True).clamp(min=-1e300))
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(
            moved,
            q,
            k,
            v,
            scale=scale,
            key_padding_mask=None if keys is None else keys.to(DEVICE),
            attention_mask=None if attention is None else attention.to(DEVICE),
            backend=backend,
        )

    inputs = [random(2, heads, n, 21, seed=i) for i, n in enumerate((rows, columns, columns))]
    check(ours, reference, inputs, dtype)


def test_gradcheck() -> None:
    pattern = random_pattern((2, 20, 18, 16))
    values = random(*pattern.values_shape).requires_grad_()
    a, b = random(2, 20, 2, seed=1).requires_grad_(), random(2, 2, 18, seed=2).requires_grad_()
    options = {"fast_mode": True}
    product = lambda a, b: block_matmul(pattern, a, b, "sdd")  # noqa: E731
    assert torch.autograd.gradcheck(product, (a, b), **options)
    assert torch.autograd.gradgradcheck(product, (a, b), **options)
    for mode, inputs in (("dsd", (values, b.detach().mT.requires_grad_())), ("dds", (a.detach().mT, values))):
        product = lambda a, b, mode=mode: block_matmul(pattern, a, b, mode)  # noqa: E731
        assert torch.autograd.gradcheck(product, inputs, **options)
        assert torch.autograd.gradgradcheck(product, inputs, **options)
    table = random(2, 37, seed=3).requires_grad_()
    softmax = lambda s, t: block_softmax(pattern, s, scale=0.5, relative_bias=t)  # noqa: E731
    assert torch.autograd.gradcheck(softmax, (values, table), **options)
    given = tuple(random(2, n, 3, seed=n).requires_grad_() for n in (20, 18, 18))
    assert torch.autograd.gradcheck(lambda q, k, v: block_attention(pattern, q, k, v), given, **options)


@pytest.mark.parametrize("triton", [False, True])
def test_operators_are_well_formed(triton: bool) -> None:
    pattern = random_pattern((2, 20, 18, 16)).to(DEVICE)
    transposed, order = pattern.blocks.transpose
    structure = pattern.blocks.indptr, pattern.blocks.indices, transposed.indptr, transposed.indices, order

    def leaf(*shape: int) -> Tensor:
        return random(*shape).float().to(DEVICE).requires_grad_()

    a, b, values = leaf(1, 2, 20, 16), leaf(1, 2, 18, 16), leaf(1, *pattern.values_shape)
    ops = torch.ops.diffnet
    torch.library.opcheck(ops.block_sdd.default, (structure, a, b, 16, 20, 18, triton))
    torch.library.opcheck(ops.block_dsd.default, (structure, values, b, 16, 20, 18, False, triton))
    torch.library.opcheck(ops.block_dsd.default, (structure, values, a, 16, 20, 18, True, triton))
    torch.library.opcheck(ops.block_attention.default, (structure, a, b, b, None, None, 0.5, 16, triton))
    bias = leaf(*pattern.values_shape)
    arguments = (*structure[:2], values, bias, None, None, 0.5, 2, 20, 18, triton)
    torch.library.opcheck(ops.block_softmax.default, arguments)
    arguments = (*structure[:2], values.detach(), values.detach(), 0.5, triton)
    torch.library.opcheck(ops.block_softmax_backward.default, arguments)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_without_blocks(backend: str) -> None:
    pattern = BlockPattern.from_mask(torch.zeros(2, 2, 3, dtype=torch.bool), 16, 20, 40).to(DEVICE)
    values = torch.zeros(0, 16, 16, device=DEVICE)
    x, y = torch.ones(2, 40, 5, device=DEVICE), torch.ones(2, 20, 5, device=DEVICE)
    out = block_matmul(pattern, values, x, "dsd", backend=backend)
    assert torch.equal(out, torch.zeros(2, 20, 5, device=DEVICE))
    assert block_matmul(pattern, y, x, "sdd", transpose_b=True, backend=backend).shape == values.shape
    assert block_softmax(pattern, values, backend=backend).shape == values.shape
    assert torch.equal(block_attention(pattern, y, x, x, backend=backend), torch.zeros_like(y))


def test_one_set_of_values_for_a_batch() -> None:
    pattern = random_pattern((1, 37, 50, 16))
    moved = pattern.to(DEVICE)
    check(
        lambda s, x: block_matmul(moved, s, x, "dsd"),
        lambda s, x: pattern.to_dense(s) @ x,
        [random(*pattern.values_shape), random(3, 1, 50, 4, seed=1)],
        torch.float64,
    )


def test_autocast_and_low_precision() -> None:
    pattern = random_pattern((1, 37, 50, 16)).to(DEVICE)
    values, x = (random(*s).float().to(DEVICE) for s in (pattern.values_shape, (1, 50, 4)))
    exact = pattern.to_dense(values) @ x
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = block_matmul(pattern, values, x, "dsd")
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded.float() - exact) < 1e-2 * torch.linalg.norm(exact)
    assert block_matmul(pattern, values, x.double(), "dsd").dtype == torch.float64


# Patterns


def test_layouts() -> None:
    for shape in SHAPES:
        pattern = random_pattern(shape)
        again = BlockPattern.from_mask(pattern.mask, pattern.block, pattern.rows, pattern.columns)
        assert torch.equal(again.mask, pattern.mask)
        values = random(2, *pattern.values_shape)
        dense = pattern.to_dense(values)
        assert dense.shape == (2, *shape[:3])
        assert torch.equal(pattern.to_dense(pattern.sample(dense)), dense)


def test_one_layout_for_all_heads() -> None:
    pattern = random_pattern((1, 37, 50, 16))
    expanded = pattern.expand_heads(3)
    assert expanded.shape == (3, 37, 50)
    assert torch.equal(expanded.mask, pattern.mask.expand(3, -1, -1))
    with pytest.raises(ValueError, match="got 3 and 2"):
        expanded.expand_heads(2)


def test_covering() -> None:
    mask = np.random.default_rng(0).random((70, 40)) < 0.01
    found = scipy.sparse.csr_matrix(mask)
    pattern = BlockPattern.covering(Pattern(torch.tensor(found.indptr), torch.tensor(found.indices), 40), 16)
    assert pattern.shape == (1, 70, 40)
    padded = np.zeros((80, 48), dtype=bool)
    padded[:70, :40] = mask
    expected = padded.reshape(5, 16, 3, 16).any(axis=(1, 3))
    np.testing.assert_array_equal(pattern.mask[0], expected)


def test_conversions() -> None:
    pattern = random_pattern((1, 48, 32, 16))
    values = random(*pattern.values_shape)
    dense = pattern.to_dense(values)[0]
    torch.testing.assert_close(pattern.to_torch(values).to_dense(), dense)
    np.testing.assert_array_equal(pattern.to_scipy(values).toarray(), dense)
    for again, same in (
        BlockPattern.from_torch(pattern.to_torch(values)),
        BlockPattern.from_scipy(pattern.to_scipy(values)),
    ):
        torch.testing.assert_close(again.to_dense(same)[0], dense)
    for wrong in (random_pattern((2, 48, 32, 16)), random_pattern((1, 47, 32, 16))):
        for convert in (wrong.to_torch, wrong.to_scipy):
            with pytest.raises(ValueError, match="BSR"):
                convert(random(*wrong.values_shape))
    with pytest.raises(ValueError, match="strided"):
        BlockPattern.from_torch(dense)
    with pytest.raises(ValueError, match="csr"):
        BlockPattern.from_scipy(scipy.sparse.csr_array(dense.numpy()))


def test_what_does_not_fit() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="block should be one of 16, 32, 64, 128, got 8"):
        BlockPattern.from_mask(mask, 8)
    with pytest.raises(ValueError, match=r"shape \(3, 3\), shape is \(2, 3\)"):
        BlockPattern.from_mask(mask, 16, rows=40)
    with pytest.raises(ValueError, match="float32"):
        BlockPattern.from_mask(mask.float(), 16)
    pattern = BlockPattern.from_mask(mask, 16, 30, 40)
    values, x = torch.zeros(pattern.values_shape), torch.zeros(1, 40, 4)
    for a, b, mode, message in (
        (values, x, "ssd", "'ssd'"),
        (values[1:], x, "dsd", r"\(…, 6, 16, 16\), shape is \(5, 16, 16\)"),
        (values, x[:, 1:], "dsd", r"\(…, 1, 40, C\), as used it is \(1, 39, 4\)"),
        (x, x, "sdd", r"\(…, 1, 30, K\) and \(…, 1, K, 40\)"),
    ):
        with pytest.raises(ValueError, match=message):
            block_matmul(pattern, a, b, mode)
    with pytest.raises(ValueError, match=r"\(…, 1, 30, C\) and twice \(…, 1, 40, C\), shapes are \(1, 40, 4\)"):
        block_attention(pattern, x, x, x)
    for options, message in (
        ({"relative_bias": torch.zeros(1, 70)}, r"\(1 or 1, 69\), shape is \(1, 70\)"),
        ({"key_padding_mask": torch.zeros(40)}, r"bool of shape \(40,\), got torch\.float32"),
        ({"attention_mask": torch.zeros(30, 40)}, "bool, got"),
        ({"attention_mask": torch.zeros(30, 41, dtype=torch.bool)}, r"1, 30, 40\) expected, shape is \(1, 30, 41\)"),
    ):
        with pytest.raises(ValueError, match=message):
            block_softmax(pattern, values, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_on_a_gpu(block: int, dtype: torch.dtype) -> None:
    shape = (2, 700, 900, block)
    pattern = random_pattern(shape)
    moved = pattern.to("cuda")
    values, x, y = random(*pattern.values_shape), random(2, 900, 200, seed=1), random(2, 700, 200, seed=2)
    check(lambda s, x: block_matmul(moved, s, x, "dsd"), lambda s, x: pattern.to_dense(s) @ x, [values, x], dtype)
    check(
        lambda y, x: block_matmul(moved, y, x, "sdd", transpose_b=True),
        lambda y, x: pattern.sample(y @ x.mT),
        [y, x],
        dtype,
    )
