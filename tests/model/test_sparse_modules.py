"""Layers on sparse matrices without blocks against dense layers of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from float64 import DEVICE, random
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from diffnet import SparseLinear, SparseMultiheadAttention
from diffnet.ops import BlockPattern, Pattern, SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")

B, L, S, E, H = 3, 11, 7, 8, 2


def mask_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A random mask, whose second row is empty."""
    mask = random(rows, columns, seed=seed) > 0
    mask[1] = False
    return mask


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_against_dense(bias: bool) -> None:
    torch.manual_seed(0)
    layer = SparseLinear(Pattern.from_mask(mask_of(9, 5)), bias=bias).double()
    pattern, parameters = layer.pattern, list(layer.parameters())
    for shape in ((7, 5), (2, 3, 5), (5,), (0, 5)):
        x = random(*shape).requires_grad_()
        dense = torch.zeros(9, 5).double().index_put((pattern.row_indices, pattern.column_indices), layer.weight)
        weights = random(*shape[:-1], 9, seed=1)
        leaves = [x, *parameters]
        out, expected = layer(x), F.linear(x, dense, layer.bias)
        assert_same([out], [expected])
        assert_same(
            list(torch.autograd.grad((out * weights).sum(), leaves)),
            list(torch.autograd.grad((expected * weights).sum(), leaves)),
        )
    with pytest.raises(ValueError, match=r"5 features, shape is \(7, 6\)"):
        layer(torch.zeros(7, 6))
    with pytest.raises(TypeError, match=r"got Tensor; write for example Pattern\.from_mask\(mask\)"):
        SparseLinear(mask_of(9, 5))  # type: ignore[arg-type]


def test_linear_from_a_pruned_layer() -> None:
    dense = nn.Linear(20, 30)
    x = torch.randn(4, 20)
    pruned = copy.deepcopy(dense)
    prune.l1_unstructured(pruned, "weight", amount=0.75)
    layer = SparseLinear.from_dense(pruned)
    assert layer.weight.shape == (150,)
    torch.testing.assert_close(layer(x), pruned(x))
    torch.testing.assert_close(SparseLinear.from_dense(dense, density=0.25)(x), pruned(x))
    torch.testing.assert_close(SparseLinear.from_dense(dense, mask=pruned.weight != 0)(x), pruned(x))
    torch.testing.assert_close(SparseLinear.from_dense(dense)(x), dense(x))
    assert SparseLinear.from_dense(nn.Linear(20, 30, bias=False), density=0).bias is None
    for wrong, message in (
        ({"density": 2}, "density should be from 0 to 1, got 2"),
        ({"density": 0.5, "mask": pruned.weight != 0}, "density or mask, got both"),
        ({"mask": torch.ones(30, 19, dtype=torch.bool)}, r"mask should have shape \(30, 20\), shape is \(30, 19\)"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseLinear.from_dense(dense, **wrong)  # type: ignore[arg-type]


def test_linear_is_trained_and_saved() -> None:
    """Weights stay at the entries, and a state dict holds the pattern."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    target = x @ torch.randn(16, 4)
    layer = SparseLinear(Pattern.random(4, 16, 0.5))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 1.5
    other = SparseLinear(Pattern.random(4, 16, 0.5))
    assert not torch.equal(other.pattern.indices, layer.pattern.indices)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(ValueError, match="a pattern of 16 entries expected, got 32"):
        SparseLinear(Pattern.random(4, 16, 0.25)).load_state_dict(layer.state_dict())


def test_linear_starts_like_a_dense_one() -> None:
    torch.manual_seed(0)
    layer, dense = SparseLinear(Pattern.random(256, 512, 1.0)), nn.Linear(512, 256)
    for ours, theirs in ((layer.weight, dense.weight), (layer.bias, dense.bias)):
        assert ours.abs().max() <= 512**-0.5
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1)


MASKS: list[dict[str, Any]] = [
    {},
    {"key_padding_mask": True},
    {"attn_mask": "bool"},
    {"attn_mask": "float"},
    {"attn_mask": "bool of each sample", "key_padding_mask": True},
    {"attn_mask": "float of each sample"},
]


@pytest.mark.parametrize("kind", ["entries", "blocks"])
@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_attention_against_the_dense_module(kind: str, masks: dict[str, Any]) -> None:
    """Outputs, and gradients of inputs, parameters and a mask of numbers."""
    torch.manual_seed(0)
    length, keys = (L, S) if kind == "entries" else (40, 24)
    dense = nn.MultiheadAttention(E, H, batch_first=True).double()
    nn.init.normal_(dense.in_proj_bias)
    sparse = SparseMultiheadAttention(E, H).double()
    sparse.load_state_dict(dense.state_dict())
    if kind == "entries":
        seen = random(length, keys) > 0
        seen[:, 0] = True  # a row without a key is NaN in the dense module
        pattern: Any = Pattern.from_mask(seen)
    else:
        blocks = torch.tensor([[True, False], [True, True], [True, False]])
        pattern = BlockPattern.from_mask(blocks, 16, length, keys)
        seen = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)[:length, :keys]
    inputs = [random(B, n, E, seed=i).requires_grad_() for i, n in enumerate((length, keys, keys))]
    given: dict[str, Any] = {}
    hidden = ~seen
    if "key_padding_mask" in masks:
        given["key_padding_mask"] = torch.arange(keys) >= torch.tensor([keys, 3, 5])[:, None]
    leaves = [*inputs]
    combined: Tensor = torch.zeros(length, keys).double().masked_fill(hidden, -torch.inf)
    if "attn_mask" in masks:
        shape = (B * H, length, keys) if "sample" in masks["attn_mask"] else (length, keys)
        if "bool" in masks["attn_mask"]:
            mask = random(*shape, seed=5) > 0.5
            mask[..., 0] = False
            combined = combined.masked_fill(mask, -torch.inf)
        else:
            mask = random(*shape, seed=5).requires_grad_()
            combined = combined + mask
            leaves.append(mask)
        given["attn_mask"] = mask
    padding = given.get("key_padding_mask")
    if padding is not None:
        padding = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)  # of the dtype of the mask
    expected, _ = dense(*inputs, attn_mask=combined, key_padding_mask=padding)
    found = sparse(*inputs, pattern, **given)
    weights = random(*expected.shape, seed=9)
    assert_same([found], [expected])
    names = [name for name, _ in dense.named_parameters()]
    assert names == [name for name, _ in sparse.named_parameters()]
    assert_same(
        list(torch.autograd.grad((found * weights).sum(), [*leaves, *sparse.parameters()])),
        list(torch.autograd.grad((expected * weights).sum(), [*leaves, *dense.parameters()])),
    )


def test_masks_at_the_entries() -> None:
    """Values of a mask at the entries equal the dense mask, of all heads or of each."""
    attention = SparseMultiheadAttention(E, H).double()
    x, pattern = random(B, L, E), Pattern.window(L, 3, 1)
    dense = random(L, L, seed=1)
    entries = dense[pattern.row_indices, pattern.column_indices]
    expected = attention(x, x, x, pattern, attn_mask=dense)
    for mask in (entries, entries.expand(H, -1), entries.expand(B, H, -1)):
        assert_same([attention(x, x, x, pattern, attn_mask=mask)], [expected])
    hidden = entries > 0
    seen = SparseMatrix(pattern, (~hidden).double()).to_torch().to_dense() > 0
    assert_same([attention(x, x, x, pattern, attn_mask=hidden)], [attention(x, x, x, Pattern.from_mask(seen))])


def test_rows_without_keys_and_dropout() -> None:
    torch.manual_seed(0)
    attention = SparseMultiheadAttention(E, H, dropout=0.5)
    nn.init.normal_(attention.out_proj.bias)
    x, mask = torch.randn(2, 16, E), mask_of(16, 16)
    patterns = (Pattern.from_mask(mask), BlockPattern.from_mask(torch.tensor([[True]]), 16))
    assert torch.equal(attention(x, x, x, patterns[0])[:, 1], attention.out_proj.bias.expand(2, E))
    for pattern in patterns:
        assert not torch.equal(attention(x, x, x, pattern), attention(x, x, x, pattern))
        attention.eval()
        assert torch.equal(attention(x, x, x, pattern), attention(x, x, x, pattern))
        attention.train()


def test_messages() -> None:
    with pytest.raises(ValueError, match="num_heads should divide embed_dim, 8, got 3"):
        SparseMultiheadAttention(8, 3)
    attention, x = SparseMultiheadAttention(E, H), torch.zeros(1, L, E)
    with pytest.raises(TypeError, match=r"got Tensor; Pattern\.from_mask converts"):
        attention(x, x, x, torch.ones(L, L, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"the pattern should have shape \(11, 11\), shape is \(5, 5\)"):
        attention(x, x, x, Pattern.window(5, 1))
    window = Pattern.window(L, 0, 0)
    with pytest.raises(ValueError, match=r"query should have shape \(batch, length, 8\), shape is \(11, 8\)"):
        attention(x[0], x, x, window)
    with pytest.raises(ValueError, match=r"key_padding_mask should have shape \(1, 11\), shape is \(11,\)"):
        attention(x, x, x, window, key_padding_mask=torch.zeros(L, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask should have shape \(…, 11, 11\) or \(…, 11\), shape is \(3,\)"):
        attention(x, x, x, window, attn_mask=torch.zeros(3))
    x, blocks = torch.zeros(1, 16, E), BlockPattern.from_mask(torch.tensor([[True]]), 16)
    with pytest.raises(ValueError, match=r"attn_mask should have shape \(…, 16, 16\), shape is \(5, 5\)"):
        attention(x, x, x, blocks, attn_mask=torch.zeros(5, 5))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    layer = SparseLinear(Pattern.random(96, 64, 0.2))
    attention = SparseMultiheadAttention(64, 4)
    x, pattern = torch.randn(2, 50, 64), Pattern.window(50, 8, 2)
    expected = layer(attention(x, x, x, pattern))
    x = x.to(DEVICE)
    found = layer.to(DEVICE)(attention.to(DEVICE)(x, x, x, pattern.to(DEVICE)))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
