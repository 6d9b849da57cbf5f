"""Block-sparse products, softmax and attention against dense ones in float64, on plain PyTorch and Triton kernels."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from float64 import DEVICE, check, random
from refusals import refused
from sparse_cases import backends, cases_of, check_softmax_of_nan, name_of, strided
from torch import Tensor

from diffnet.ops import Backend, BlockPattern, Pattern, block_attention, block_matmul, block_softmax
from diffnet.ops.block_sparse.op import MatmulMode

Shape = tuple[int, int, int, int]  # heads, rows, columns, block

# Sizes that the block divides and others, a single block, and more than one step of 64.
SHAPES = [(2, 37, 50, 16), (3, 20, 9, 32), (1, 64, 130, 64), (1, 128, 128, 128)]
# (backend, dtype, the shapes that are fast enough for the interpreter, which doesn't multiply bfloat16)
KINDS: list[tuple[str, torch.dtype, list[Shape]]] = [
    ("torch", torch.float64, SHAPES),
    ("torch", torch.bfloat16, [(2, 37, 50, 16)]),
    ("triton", torch.float32, SHAPES),
    ("triton", torch.float16, [(2, 37, 50, 16)]),
    ("triton", torch.bfloat16, []),
]


def shape_id(shape: Shape) -> str:
    return "{} of {}x{} in {}".format(*shape)


cases = pytest.mark.parametrize(("shape", "backend", "dtype"), cases_of(KINDS, SHAPES, shape_id))
flags = pytest.mark.parametrize(
    ("transpose_a", "transpose_b"), [(False, False), (True, False), (True, True)], ids=["A B", "At B", "At Bt"]
)

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def random_pattern(shape: Shape, seed: int = 0) -> BlockPattern:
    """Return a layout per head, with an empty block row and an empty block column if there are at least 3."""
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


@cases
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
@flags
def test_products(
    shape: Shape, backend: Backend, dtype: torch.dtype, mode: MatmulMode, transpose_a: bool, transpose_b: bool
) -> None:
    heads, rows, columns, _ = shape
    pattern = random_pattern(shape)
    moved = pattern.to(DEVICE)
    # Values beyond the edge of a matrix are random, and must be ignored.
    a = b = random(2, *pattern.values_shape)
    if mode != "dsd":
        inner = (rows, 21) if mode == "sdd" else (21, columns if transpose_b else rows)
        a = flipped(random(2, heads, *inner, seed=2), transpose_a).contiguous()
    if mode != "dds":
        inner = (21, columns) if mode == "sdd" else (rows if transpose_a else columns, 21)
        b = flipped(random(2, heads, *inner, seed=1), transpose_b).contiguous()

    def reference(a: Tensor, b: Tensor) -> Tensor:
        a, b = pattern.to_dense(a) if mode == "dsd" else a, pattern.to_dense(b) if mode == "dds" else b
        product = flipped(a, transpose_a) @ flipped(b, transpose_b)
        return pattern.sample(product) if mode == "sdd" else product

    product = partial(block_matmul, moved, mode=mode, transpose_a=transpose_a, transpose_b=transpose_b, backend=backend)
    check(product, reference, [a, b], dtype)


def random_masks(shape: Shape, extras: str) -> dict[str, Tensor]:
    """None, one of the keys of two sets, or also one of all pairs, which leaves a row without a visible entry."""
    heads, rows, columns, _ = shape
    attention = random(heads, rows, columns, seed=4) > -0.5
    attention[:, 2] = False
    masks = {"key_padding_mask": random(2, columns, seed=3) > -0.5, "attention_mask": attention}
    return dict([*masks.items()][: ("none", "keys", "all").index(extras)])


def dense_weights(
    pattern: BlockPattern, scores: Tensor, key_padding_mask: Tensor | None = None, attention_mask: Tensor | None = None
) -> Tensor:
    """Return the softmax over the rows of dense scores (…, H, rows, columns), 0 where there is no visible entry."""
    there = pattern.to_dense(torch.ones(pattern.values_shape)) > 0
    there = there if key_padding_mask is None else there & key_padding_mask[:, None, None, :]
    there = there if attention_mask is None else there & attention_mask
    weights = torch.softmax(scores.masked_fill(~there, -1e300), -1)
    return weights.masked_fill(~there, 0)


def relative_places(rows: int, columns: int) -> Tensor:
    """The place of each pair in a relative bias."""
    return torch.arange(columns) - torch.arange(rows)[:, None] + rows - 1


@cases
@pytest.mark.parametrize("extras", ["none", "keys", "all"])
def test_softmax(shape: Shape, backend: Backend, dtype: torch.dtype, extras: str) -> None:
    heads, rows, columns, _ = shape
    pattern, masks, place = random_pattern(shape), random_masks(shape, extras), relative_places(rows, columns)
    moved, options = pattern.to(DEVICE), {name: mask.to(DEVICE) for name, mask in masks.items()}

    def ours(scores: Tensor, table: Tensor | None = None) -> Tensor:
        return block_softmax(moved, scores, scale=-0.6, relative_bias=table, backend=backend, **options)

    def reference(scores: Tensor, table: Tensor | None = None) -> Tensor:
        full = -0.6 * pattern.to_dense(scores) + (0 if table is None else table[:, place])
        return pattern.sample(dense_weights(pattern, full, **masks))

    bias = [random(heads, rows + columns - 1, seed=2)] if extras == "all" else []
    check(ours, reference, [random(2, *pattern.values_shape), *bias], dtype)


@cases
@pytest.mark.parametrize("extras", ["none", "all"])
def test_attention(shape: Shape, backend: Backend, dtype: torch.dtype, extras: str) -> None:
    heads, rows, columns, _ = shape
    pattern, masks = random_pattern(shape), random_masks(shape, extras)
    moved, options = pattern.to(DEVICE), {name: mask.to(DEVICE) for name, mask in masks.items()}
    check(
        lambda q, k, v: block_attention(moved, q, k, v, scale=0.3, backend=backend, **options),
        lambda q, k, v: dense_weights(pattern, 0.3 * q @ k.mT, **masks) @ v,
        [random(2, heads, n, 21, seed=i) for i, n in enumerate((rows, columns, columns))],
        dtype,
    )


@backends
def test_without_blocks(backend: Backend) -> None:
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
    refused(ValueError, "got 3 and 2", expanded.expand_heads, 2)


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
            refused(ValueError, "BSR", convert, random(*wrong.values_shape))
    refused(ValueError, "strided", BlockPattern.from_torch, dense)
    refused(ValueError, "csr", BlockPattern.from_scipy, scipy.sparse.csr_array(dense.numpy()))
    for dtype in (torch.float16, torch.bfloat16):
        found = pattern.to_scipy(values.to(dtype))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.toarray(), dense.to(dtype).float().numpy())


def test_wrong_arguments_are_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    refused(ValueError, "block should be one of 16, 32, 64, 128, got 8", BlockPattern.from_mask, mask, 8)
    refused(ValueError, r"shape \(3, 3\), shape is \(2, 3\)", BlockPattern.from_mask, mask, 16, rows=40)
    refused(ValueError, "float32", BlockPattern.from_mask, mask.float(), 16)
    refused(ValueError, "block should be one of .*, got 0", BlockPattern.covering, Pattern.from_mask(mask), 0)
    array = np.ones((32, 32), dtype=bool)
    refused(TypeError, "mask should be a tensor, got ndarray", BlockPattern.from_mask, array, 16)
    refused(TypeError, "pattern should be a Pattern, got ndarray", BlockPattern.covering, array, 16)
    refused(TypeError, "blocks should be a Pattern, got ndarray", BlockPattern, array, 16, 32, 32)
    for convert in (BlockPattern.from_torch, BlockPattern.from_scipy):
        refused(TypeError, "expected, got ndarray", convert, array)
    refused(TypeError, "got ndarray", BlockPattern.from_mask(mask[:, :2], 16).sample, array[None])
    pattern = BlockPattern.from_mask(mask, 16, 30, 40)
    values, x = torch.zeros(pattern.values_shape), torch.zeros(1, 40, 4)
    for a, b, mode, message in (
        (values, x, "ssd", "'ssd'"),
        (values[1:], x, "dsd", r"\(…, 6, 16, 16\), shape is \(5, 16, 16\)"),
        (values, x[:, 1:], "dsd", r"\(…, 1, 40, C\) after .* is \(1, 39, 4\)"),
        (x, x, "sdd", r"\(…, 1, 30, K\) and \(…, 1, K, 40\)"),
    ):
        refused(ValueError, message, block_matmul, pattern, a, b, mode)
    with pytest.raises(ValueError, match=r"\(…, 1, 30, C\), key and value \(…, 1, 40, C\), shapes are \(1, 40, 4\)"):
        block_attention(pattern, x, x, x)
    empty = torch.zeros(1, 30, 0), *[torch.zeros(1, 40, 0)] * 2
    refused(ValueError, r"at least one channel, shape is \(1, 30, 0\)", block_attention, pattern, *empty)
    for dtype in (torch.int64, torch.bool):
        a, b = values.to(dtype), x.to(dtype)
        refused(TypeError, f"got {dtype} and {dtype}", block_matmul, pattern, a, b, "dsd")
        table = torch.zeros(1, 69, dtype=dtype)
        refused(
            TypeError, "relative_bias should be floating point", block_softmax, pattern, values, relative_bias=table
        )
    for options, message in (
        ({"relative_bias": torch.zeros(1, 70)}, r"\(1 or 1, 69\), shape is \(1, 70\)"),
        ({"key_padding_mask": torch.zeros(40)}, r"bool of shape \(40,\), got torch\.float32"),
        ({"attention_mask": torch.zeros(30, 40)}, "bool, got"),
        ({"attention_mask": torch.zeros(30, 41, dtype=torch.bool)}, r"1, 30, 40\) expected, shape is \(1, 30, 41\)"),
    ):
        refused(ValueError, message, block_softmax, pattern, values, **options)


@backends
def test_strided_masks_and_bias(backend: Backend) -> None:
    pattern = random_pattern((1, 20, 37, 16)).to(DEVICE)
    scores = random(2, *pattern.values_shape).float().to(DEVICE)
    table = random(1, 56, seed=1).float().to(DEVICE)
    keys, attention = (random(*s, seed=2).to(DEVICE) > -0.5 for s in ((2, 37), (20, 37)))
    results = []
    for change in (lambda t: t, strided):
        masks = {"key_padding_mask": change(keys), "attention_mask": change(attention)}
        q, k = (random(2, 1, n, 4, seed=n).float().to(DEVICE) for n in (20, 37))
        results.append(
            (
                block_softmax(pattern, scores, relative_bias=change(table), backend=backend, **masks),
                block_attention(pattern, q, k, k, backend=backend, **masks),
            )
        )
    torch.testing.assert_close(*results, rtol=0, atol=0)


@backends
@pytest.mark.parametrize(
    ("scale", "bias"),
    [((), None), ((2,), "values"), (None, "dense per head"), (None, "values per set"), ((1,), "dense per set")],
    ids=str,
)
def test_tensor_scales_and_biases(scale: tuple[int, ...] | None, bias: str | None, backend: Backend) -> None:
    """Values of softmax and attention, and the gradients for all tensors. A relative bias adds to the other bias."""
    heads, rows, columns, _ = shape = (2, 20, 37, 16)
    pattern = random_pattern(shape)
    moved = pattern.to(DEVICE)
    sizes = {
        "values": pattern.values_shape,
        "dense per head": (heads, rows, columns),
        "values per set": (3, *pattern.values_shape),
        "dense per set": (3, 1, rows, columns),
    }
    more = [] if scale is None else [random(2, seed=5)[: math.prod(scale)].reshape(scale)]
    more += [] if bias is None else [random(*sizes[bias], seed=6)]
    place = relative_places(rows, columns)

    def options(rest: tuple[Tensor, ...]) -> dict[str, Any]:
        return {
            "scale": -0.3 if scale is None else rest[0],
            "bias": None if bias is None else rest[len(more) - 1],
            "backend": backend,
        }

    def dense(scores: Tensor, *rest: Tensor) -> Tensor:
        scores = scores * (-0.3 if scale is None else rest[0].expand(heads)[:, None, None])
        if bias is None:
            return scores
        added = rest[len(more) - 1]
        return scores + (pattern.to_dense(added) if "values" in bias else added)

    dtype = torch.float64 if backend == "torch" else torch.float32
    check(
        lambda s, *rest: moved.to_dense(
            block_softmax(moved, s, relative_bias=rest[-1] if bias else None, **options(rest))
        ),
        lambda s, *rest: dense_weights(
            pattern, dense(pattern.to_dense(s), *rest) + (rest[-1][:, place] if bias else 0)
        ),
        [random(3, *pattern.values_shape), *more, *([random(heads, rows + columns - 1, seed=7)] if bias else [])],
        dtype,
    )
    check(
        lambda q, k, v, *rest: block_attention(moved, q, k, v, **options(rest)),
        lambda q, k, v, *rest: dense_weights(pattern, dense(q @ k.mT, *rest)) @ v,
        [*(random(3, heads, n, 4, seed=i) for i, n in enumerate((rows, columns, columns))), *more],
        dtype,
    )


@backends
def test_wrong_scales_and_biases_are_refused(backend: Backend) -> None:
    pattern = random_pattern((2, 20, 37, 16)).to(DEVICE)
    x = {name: torch.zeros(3, 2, n, 4, device=DEVICE) for name, n in (("query", 20), ("key", 37), ("value", 37))}
    scores = torch.zeros(3, *pattern.values_shape, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    count = pattern.values_shape[0]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"scale": one.expand(3)}, ValueError, r"scale should have shape \(\) or \(2,\), shape is \(3,\)"),
        ({"scale": one.expand(2, 1)}, ValueError, r"shape is \(2, 1\)"),
        ({"scale": one.long()}, TypeError, r"scale should be floating point, got torch\.int64"),
        ({"scale": one.to("meta")}, ValueError, "scale should be on"),
        ({"scale": "1"}, TypeError, "scale should be a number or a tensor, got str"),
        ({"bias": [0.5]}, TypeError, "bias should be a tensor, got list"),
        ({"bias": one.long().expand(20, 37)}, TypeError, r"bias should be floating point, got torch\.int64"),
        (
            {"bias": one.expand(20, 36)},
            ValueError,
            rf"bias should have shape \(…, 2 or 1, 20, 37\) or \(…, {count}, 16, 16\), shape is \(20, 36\)",
        ),
        ({"bias": one.expand(3, 20, 37)}, ValueError, r"shape is \(3, 20, 37\)"),
        ({"bias": one.expand(4, 1, 20, 37)}, ValueError, rf"should broadcast to \(3, {count}, 16, 16\)"),
        ({"bias": one.to("meta").expand(20, 37)}, ValueError, "bias should be on"),
    ]
    for options, error, message in wrong:
        refused(error, message, block_softmax, pattern, scores, backend=backend, **options)
        refused(error, message, block_attention, pattern, **x, backend=backend, **options)
    values = random(*pattern.values_shape).float().to(DEVICE)
    truth = block_softmax(pattern, values, scale=True, backend=backend)
    assert torch.equal(truth, block_softmax(pattern, values, scale=1.0, backend=backend))


@backends
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_fills_its_row(value: float, backend: Backend) -> None:
    """Entries beyond the matrix are hidden, too."""
    pattern, keys = random_pattern((1, 20, 37, 16)), torch.arange(37) % 5 != 0
    rows = pattern.sample(torch.arange(20)[:, None].expand(1, 20, 37)).flatten()
    moved, masks = pattern.to(DEVICE), {"key_padding_mask": keys.expand(2, 37).to(DEVICE)}

    def softmax(scores: Tensor) -> Tensor:
        scores = scores.view(2, *pattern.values_shape)
        return block_softmax(moved, scores, backend=backend, **masks).flatten(1)

    check_softmax_of_nan(softmax, rows, pattern.sample(keys.expand(1, 20, 37)).flatten(), (3,), value, False)


def test_attention_of_nan_agrees_on_both_backends() -> None:
    """A NaN query spoils its own row, and the gradients of the keys and values that it reads, but no others."""
    mask = torch.tensor([[True, False, True], [False, True, True]])
    pattern = BlockPattern.from_mask(mask, 16, 30, 40).to(DEVICE)
    results = []
    for backend in ("torch", "triton"):
        leaves = [random(1, n, 4, seed=i).float() for i, n in enumerate((30, 40, 40))]
        leaves[0][0, 18, 1] = torch.nan  # reads the columns from 16 on
        leaves = [t.to(DEVICE).requires_grad_() for t in leaves]
        out = block_attention(pattern, *leaves, backend=backend)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.sum(), leaves)
        assert out[0, 18].isnan().all()
        assert out.isnan().sum() == 4
        assert grads[0][0, 18].isnan().all()
        for t in grads[1:]:
            assert t[0, :16].isfinite().all()
            assert t[0, 16:].isnan().all()
        results.append([out, *grads])
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_batches_too_large_for_a_launch_are_refused() -> None:
    layout = torch.zeros(64, 1, dtype=torch.bool)
    layout[0] = True
    pattern = BlockPattern.from_mask(layout, 16, 1024, 16).to(DEVICE)
    sets, programs = 2**26, 2**32
    scores, q, k = (  # these take no memory
        torch.zeros(1, device=DEVICE).expand(sets, 1, *size) for size in ((16, 16), (1024, 1), (16, 1))
    )
    many = torch.zeros(1, device=DEVICE).expand(programs, 1, 1024, 16)
    for operation, operands in (
        (block_softmax, (scores,)),
        (block_attention, (q, k, k)),
        (block_matmul, (scores, k, "dsd")),
        (block_matmul, (many[..., :1], many[..., :1, :], "sdd")),
    ):
        message = f"{operation.__name__} of these sizes takes {programs} programs"
        refused(ValueError, message, operation, pattern, *operands, backend="triton")
    tall = BlockPattern(pattern.blocks, 16, 1024, 16)
    object.__setattr__(tall, "rows", 2**31)  # such a pattern would take 1 GB
    with pytest.raises(ValueError, match=f"block_softmax take at most {2**31 - 2**20} rows and columns, got {2**31}"):
        block_softmax(tall, scores[:1], backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_large_products(block: int, dtype: torch.dtype) -> None:
    pattern = random_pattern((2, 700, 900, block))
    moved = pattern.to("cuda")
    values, x, y = random(*pattern.values_shape), random(2, 900, 200, seed=1), random(2, 700, 200, seed=2)
    check(lambda s, x: block_matmul(moved, s, x, "dsd"), lambda s, x: pattern.to_dense(s) @ x, [values, x], dtype)
    sampled = lambda y, x: block_matmul(moved, y, x, "sdd", transpose_b=True)  # noqa: E731
    check(sampled, lambda y, x: pattern.sample(y @ x.mT), [y, x], dtype)
