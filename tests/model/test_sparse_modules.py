"""Layers and attention on sparse and block-sparse matrices and on meshes, against dense modules."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from float64 import DEVICE, random
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from diffnet import (
    BlockSparseAttention,
    BlockSparseConv2d,
    BlockSparseLinear,
    DiffusionNet,
    MeshAttention,
    Operators,
    SparseLinear,
    SparseMultiheadAttention,
    collate,
    precompute,
)
from diffnet.geometry import patches, with_k_ring, with_nearest
from diffnet.ops import BlockPattern, Pattern, SparseMatrix

B, L, S, E, H = 3, 11, 7, 8, 2
C, HEADS = 8, 2


def mask_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A random mask, whose second row is empty."""
    mask = random(rows, columns, seed=seed) > 0
    mask[1] = False
    return mask


def assert_same(ours: Tensor, expected: Tensor, leaves: list[Tensor], others: list[Tensor] | None = None) -> None:
    """Compare values, and gradients for the leaves. `others` are those of the expected result if it has its own."""
    weights = random(*expected.shape, seed=9)
    results = [
        [out, *torch.autograd.grad((out * weights).sum(), inputs)]
        for out, inputs in ((ours, leaves), (expected, others or leaves))
    ]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["entries", "blocks"])
def test_linear_against_dense(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    module: Any = (
        SparseLinear(Pattern.from_mask(mask_of(9, 5)), bias=bias).double()
        if kind == "entries"
        else BlockSparseLinear(5, 50, layout(4, 1), block=16, bias=bias).double()
    )
    if bias:
        nn.init.normal_(module.bias)
    pattern = module.pattern
    for shape in ((7, 5), (2, 3, 5), (5,), (0, 5)):
        x = random(*shape).requires_grad_()
        if kind == "entries":
            dense = torch.zeros(9, 5).double().index_put((pattern.row_indices, pattern.column_indices), module.weight)
        else:
            dense = pattern.to_dense(module.weight)[0]
        assert_same(module(x), F.linear(x, dense, module.bias), [x, *module.parameters()])
    refused(ValueError, r"5 features, shape is \(7, 6\)", module, torch.zeros(7, 6))
    refused(TypeError, r"got Tensor; write for example Pattern\.from_mask\(mask\)", SparseLinear, mask_of(9, 5))


def test_linear_layers_start_like_a_dense_one() -> None:
    torch.manual_seed(0)
    dense, full = nn.Linear(512, 512), torch.ones(16, 16, dtype=torch.bool)
    sparse, blocks = SparseLinear(Pattern.random(512, 512, 1.0)), BlockSparseLinear(512, 512, full)
    for ours, theirs in ((sparse.weight, dense.weight), (blocks.weight, dense.weight), (sparse.bias, dense.bias)):
        assert ours.abs().max() <= 512**-0.5
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1 if ours is sparse.bias else 0.02)
    out = BlockSparseLinear(512, 512, full.tril())(torch.randn(2000, 512)).detach()
    assert out.std() == pytest.approx(dense(torch.randn(2000, 512)).std().item(), rel=0.1)


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
        refused(ValueError, message, SparseLinear.from_dense, dense, **wrong)


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
    assert_same(found, expected, [*leaves, *sparse.parameters()], [*leaves, *dense.parameters()])
    assert [name for name, _ in dense.named_parameters()] == [name for name, _ in sparse.named_parameters()]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["entries", "blocks"])
def test_weights_causal_masks_and_unbatched_inputs(kind: str, average: bool) -> None:
    """As the dense module has them, with a padding of numbers."""
    dense, sparse = nn.MultiheadAttention(E, H, batch_first=True).double(), SparseMultiheadAttention(E, H).double()
    sparse.load_state_dict(dense.state_dict())
    seen = torch.ones(24, 24, dtype=torch.bool)
    pattern: Any = Pattern.from_mask(seen) if kind == "entries" else BlockPattern.from_mask(seen[:2, :2], 16, 24, 24)
    x, padding, causal = random(B, 24, E), random(B, 24, seed=1), torch.ones(24, 24, dtype=torch.bool).triu(1)
    numbers = torch.zeros(24, 24).double().masked_fill(causal, -torch.inf)
    options = {"need_weights": True, "average_attn_weights": average}
    expected = dense(x, x, x, attn_mask=numbers, key_padding_mask=padding, **options)
    masks = {"is_causal": True, "key_padding_mask": padding}
    torch.testing.assert_close(sparse(x, x, x, pattern, **masks, **options), expected)
    torch.testing.assert_close(sparse(x, x, x, pattern, **masks), expected[0])
    first = {"attn_mask": causal, "key_padding_mask": padding[0]}
    found = sparse(x[0], x[0], x[0], pattern, **first, **options)
    torch.testing.assert_close(found, (expected[0][0], expected[1][0]))


def test_masks_at_the_entries() -> None:
    """Values of a mask at the entries equal the dense mask, of all heads or of each."""
    attention = SparseMultiheadAttention(E, H).double()
    x, pattern = random(B, L, E), Pattern.window(L, 3, 1)
    dense = random(L, L, seed=1)
    entries = dense[pattern.row_indices, pattern.column_indices]
    expected = attention(x, x, x, pattern, attn_mask=dense)
    for mask in (entries, entries.expand(H, -1), entries.expand(B, H, -1)):
        torch.testing.assert_close(attention(x, x, x, pattern, attn_mask=mask), expected, rtol=1e-9, atol=1e-11)
    hidden = entries > 0
    seen = SparseMatrix(pattern, (~hidden).double()).to_torch().to_dense() > 0
    found, expected = attention(x, x, x, pattern, attn_mask=hidden), attention(x, x, x, Pattern.from_mask(seen))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_masks_that_fit_places_and_entries() -> None:
    """(H, nnz) may equal (L, S). A mask with all dimensions has one meaning."""
    attention, dense = SparseMultiheadAttention(E, H).double(), nn.MultiheadAttention(E, H, batch_first=True).double()
    dense.load_state_dict(attention.state_dict())
    query, key, there = random(B, H, E), random(B, 3, E, seed=1), torch.tensor([[1, 0, 1], [0, 1, 0]]) > 0
    entries, places = random(B, H, 3, seed=2), torch.full((B, H, H, 3), -torch.inf).double()
    places[:, :, there] = entries
    expected, _ = dense(query, key, key, attn_mask=places.flatten(0, 1))
    call = partial(attention, query, key, key, Pattern.from_mask(there))
    for mask in (entries, places.flatten(0, 1)):
        torch.testing.assert_close(call(attn_mask=mask), expected, rtol=1e-9, atol=1e-11)
    message = r"shape \(2, 3\) fits both \(L, S\) and \(H, nnz\); expand it to .*\(6, 2, 3\), or to .*\(3, 2, 3\)"
    refused(ValueError, message, call, attn_mask=entries[0])


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
    refused(ValueError, "num_heads should divide embed_dim, 8, got 3", SparseMultiheadAttention, 8, 3)
    attention, x, window = SparseMultiheadAttention(E, H), torch.zeros(1, L, E), Pattern.window(L, 0, 0)
    call, padding = partial(attention, x, x, x), torch.zeros(L, dtype=torch.bool)
    refused(TypeError, r"got Tensor; Pattern\.from_mask converts", call, torch.ones(L, L, dtype=torch.bool))
    refused(ValueError, r"the pattern should have shape \(11, 11\), shape is \(5, 5\)", call, Pattern.window(5, 1))
    message = r"query should have shape \(batch, length, 8\), shape is \(11, 7\)"
    refused(ValueError, message.replace("11", "1, 11"), attention, x[..., 1:], x, x, window)
    message = r"key_padding_mask should have shape \(1, 11\), shape is \(11,\)"
    refused(ValueError, message, call, window, key_padding_mask=padding)
    message = r"attn_mask should have shape \(…, 11, 11\) or \(…, 11\), shape is \(3,\)"
    refused(ValueError, message, call, window, attn_mask=torch.zeros(3))
    x, blocks = torch.zeros(1, 16, E), BlockPattern.from_mask(torch.tensor([[True]]), 16)
    message = r"attn_mask should have shape \(…, 16, 16\), shape is \(5, 5\)"
    refused(ValueError, message, attention, x, x, x, blocks, attn_mask=torch.zeros(5, 5))


def test_blocks_of_a_dense_layer() -> None:
    dense, x = nn.Linear(40, 24), random(5, 40).float()
    dense.weight.data[:16, 16:] = 0
    layer = BlockSparseLinear.from_dense(dense, block=16)
    assert layer.pattern.mask[0].tolist() == [[True, False, False], [True, True, True]]
    assert layer.pattern.nnz == layer.weight.numel()
    torch.testing.assert_close(layer(x), dense(x))
    dense.weight.data[16:] = 0
    torch.testing.assert_close(BlockSparseLinear.from_dense(dense, layer.pattern.mask[0], block=16)(x), dense(x))


def layout(*shape: int, seed: int = 0) -> Tensor:
    """A random mask of blocks. No input reaches the second row of outputs."""
    mask = random(*shape, seed=seed) > -0.3
    mask[..., 1, :] = False
    return mask


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "mask_per_tap"),
    [(3, 1, 1, 1, False), ((3, 2), 2, 0, 1, True), (1, 1, 0, 1, False), (3, (1, 2), (2, 1), 2, True)],
    ids=["padded", "strided", "one_by_one", "dilated"],
)
def test_conv2d(kernel: object, stride: object, padding: object, dilation: object, mask_per_tap: bool) -> None:
    torch.manual_seed(0)
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel  # type: ignore[misc]
    mask = layout(height, width, 3, 2) if mask_per_tap else layout(3, 2)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    module = BlockSparseConv2d(20, 33, kernel, mask, block=16, **options).double()  # type: ignore[arg-type]
    nn.init.normal_(module.bias)
    x = random(2, 20, 9, 8).requires_grad_()
    weight = module.pattern.to_dense(module.weight)[0].unflatten(1, (height, width, 32))[..., :20].permute(0, 3, 1, 2)
    there = mask.expand(height, width, 3, 2).permute(2, 3, 0, 1).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(weight != 0, there[:33, :20])
    expected = F.conv2d(x, weight, module.bias, **options)  # type: ignore[arg-type]
    assert_same(module(x), expected, [x, *module.parameters()])


def test_wrong_shapes_of_convolutions_and_attention() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) or \(3, 3, 3, 2\), shape is \(2, 2\)"):
        BlockSparseConv2d(20, 33, 3, layout(2, 2), block=16)
    module = BlockSparseConv2d(20, 33, 3, layout(3, 2), block=16)
    refused(ValueError, r"\(N, 20, …, …\), shape is \(20, 9, 9\)", module, torch.zeros(20, 9, 9))
    refused(ValueError, "8 channels, got 3", BlockSparseAttention, 8, 3)
    pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match=r"\(4, 30, 30\) or \(1, 30, 30\), shape is \(1, 32, 32\)"):
        BlockSparseAttention(8)(torch.zeros(30, 8), pattern)


def dense_attention(module: BlockSparseAttention, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    projected = module.query_key_value(x).unflatten(-1, (3, module.heads, -1)).movedim(-3, 0).transpose(-2, -3)
    query, key, value = projected
    extra = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    mixed = F.scaled_dot_product_attention(query, key, value, extra if bias is None else extra + bias)
    return module.out(mixed.transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("mask_per_head", [False, True], ids=["shared_mask", "mask_per_head"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_masks"])
def test_block_sparse_attention(mask_per_head: bool, extras: bool) -> None:
    torch.manual_seed(0)
    n = 37
    mask = random(*((2,) if mask_per_head else ()), 3, 3) > -0.5
    mask[..., 0] = True
    pattern = BlockPattern.from_mask(mask, 16, n, n)
    module = BlockSparseAttention(8, 2, length=n if extras else None).double()
    x = random(3, n, 8).requires_grad_()
    there = pattern.to_dense(torch.ones(pattern.values_shape)) > 0
    if not extras:
        assert_same(module(x, pattern), dense_attention(module, x, there), [x, *module.parameters()])
        return
    assert module.relative_bias is not None
    nn.init.normal_(module.relative_bias)
    keys, attention = random(3, n, seed=2) > -1, random(n, n, seed=3) > -1
    keys[:, 0], attention[:, 0] = True, True
    for given in (attention, pattern.sample(attention[None])):
        bias = module.relative_bias[:, torch.arange(n) - torch.arange(n)[:, None] + n - 1]
        expected = dense_attention(module, x, there & attention & keys[:, None, None, :], bias)
        ours = module(x, pattern, key_padding_mask=keys, attention_mask=given)
        assert_same(ours, expected, [x, *module.parameters()])


@pytest.mark.parametrize("length", [None, 37], ids=["no table", "relative bias"])
@pytest.mark.parametrize("heads", [1, 2], ids=["shared mask", "mask per head"])
def test_attention_bias(heads: int, length: int | None) -> None:
    """Dense or as values of the pattern, with gradients, beside a relative bias."""
    torch.manual_seed(0)
    n = 37
    mask = (random(heads, 3, 3) > 0) | torch.eye(3, dtype=torch.bool)
    pattern = BlockPattern.from_mask(mask, 16, n, n)
    module = BlockSparseAttention(8, 2, length=length).double()
    x = random(3, n, 8)
    there = pattern.to_dense(torch.ones(pattern.values_shape)) > 0
    whole = pattern if heads == 2 else pattern.expand_heads(2)
    for bias in (random(n, n, seed=2), random(2, n, n, seed=2), random(*pattern.values_shape, seed=2)):
        bias.requires_grad_()
        dense = bias if bias.shape[-1] == n else pattern.to_dense(bias)
        table = 0 if length is None else module.relative_bias[:, torch.arange(n) - torch.arange(n)[:, None] + n - 1]
        expected = dense_attention(module, x, there, dense + table)
        assert_same(module(x, pattern, bias=bias), expected, [bias, *module.parameters()])
    bias = random(*whole.values_shape, seed=3).requires_grad_()
    if length is None:
        expected = dense_attention(module, x, there, whole.to_dense(bias))
        assert_same(module(x, whole, bias=bias), expected, [bias, *module.parameters()])


def test_kernels_agree(surfaces: list[Operators]) -> None:
    ring = surfaces[0].gradient.pattern.to(DEVICE)
    pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16, 20, 20).to(DEVICE)
    keys, window = torch.randn(2, 50, E, device=DEVICE), Pattern.window(50, 8, 2).to(DEVICE)
    cases: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] = [
        (partial(SparseLinear, Pattern.random(96, 64, 0.2)), (2, 50, 64), ()),
        (partial(SparseMultiheadAttention, E, H), (2, 50, E), (keys, keys, window)),
        (partial(BlockSparseLinear, 20, 33, layout(3, 2), block=16), (5, 20), ()),
        (partial(BlockSparseConv2d, 20, 33, 3, layout(3, 2), block=16), (1, 20, 4, 4), ()),
        (partial(MeshAttention, C, HEADS), (42, C), (ring,)),
        (partial(BlockSparseAttention, 8, 2), (20, 8), (pattern,)),
        (partial(BlockSparseAttention, 8, 2, length=20), (20, 8), (pattern,)),
    ]
    for build, shape, more in cases:
        on_kernels, plain = build(backend="triton").to(DEVICE), build(backend="torch").to(DEVICE)
        plain.load_state_dict(on_kernels.state_dict())
        x = torch.randn(shape, device=DEVICE)
        torch.testing.assert_close(on_kernels(x, *more), plain(x, *more), rtol=1e-5, atol=1e-5)


def test_dropout_of_weights(surfaces: list[Operators]) -> None:
    """The remaining weights are scaled up, so the mean over many draws is the output without dropout."""
    torch.manual_seed(0)
    blocks = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    for attention, pattern in ((MeshAttention, surfaces[0].gradient.pattern), (BlockSparseAttention, blocks)):
        module = attention(8, 2, dropout=0.5)
        x = torch.randn(pattern.shape[-1], 8)
        with torch.no_grad():
            dropped = torch.stack([module(x, pattern) for _ in range(500)])
            exact = module.eval()(x, pattern)
            assert not torch.equal(dropped[0], dropped[1])
            assert torch.equal(exact, module(x, pattern))
            assert torch.linalg.norm(dropped.mean(0) - exact) < 0.1 * torch.linalg.norm(exact)


@pytest.fixture(scope="module")
def meshes() -> Operators:
    return collate([precompute(m, k=0) for m in (trimesh.creation.icosphere(1), trimesh.creation.torus(1, 0.2, 40, 6))])


def test_attention_over_patches(meshes: Operators) -> None:
    """A vertex sees its own patch and the adjacent ones within its mesh, which include its one-ring."""
    found = patches(meshes, 16)
    v = meshes.num_vertices
    assert torch.equal(found.order[found.places], torch.arange(v))
    sees = (found.pattern.to_dense(found.mask.float())[0] > 0)[found.places][:, found.places]
    ring = meshes.gradient.pattern
    assert sees[ring.row_indices.long(), ring.column_indices.long()].all()
    mesh = torch.arange(v) >= meshes.lengths[0]
    assert not sees[mesh[:, None] != mesh].any()
    assert sees.float().mean() < 0.5 * (mesh[:, None] == mesh).float().mean()
    torch.manual_seed(0)
    module = BlockSparseAttention(8, 2).double()
    x = random(v, 8).requires_grad_()
    ours = module(x[found.order], found.pattern, attention_mask=found.mask)[found.places]
    assert_same(ours, dense_attention(module, x, sees), [x, *module.parameters()])


def test_modules_train_move_and_load() -> None:
    torch.manual_seed(0)
    mask = layout(2, 2)

    def build() -> nn.Sequential:
        convolution = BlockSparseConv2d(3, 24, 3, mask[:, :1], block=16, padding=1)
        return nn.Sequential(convolution, nn.Flatten(), BlockSparseLinear(24 * 16, 20, layout(2, 24), block=16))

    model = build().to(DEVICE)
    x, y = torch.randn(12, 3, 4, 4, device=DEVICE), torch.arange(12, device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    again = build().to(DEVICE)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x))
    meta = build().to("meta")
    assert meta[0].pattern.device.type == "meta"
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = model(x)
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded.float() - model(x)) < 0.05 * torch.linalg.norm(model(x))


def dense_mask(pattern: Pattern | None) -> Tensor:
    assert pattern is not None
    return SparseMatrix(pattern, torch.ones(pattern.nnz)).to_torch().to_dense() > 0


@pytest.fixture(scope="module")
def surfaces() -> list[Operators]:
    """A sphere, a torus with a vertex that no face uses, and a point cloud."""
    torus = trimesh.creation.torus(1, 0.4, 6, 4)
    loose = np.concatenate([[[5.0, 0, 0]], torus.vertices]), torus.faces + 1
    cloud = trimesh.creation.icosphere(1).vertices * [1, 0.7, 0.5]
    return [precompute(m, k=6) for m in (trimesh.creation.icosphere(1), loose, (cloud, None))]


def dense_mesh_attention(module: MeshAttention, x: Tensor, mask: Tensor) -> Tensor:
    query, key, value = module.query_key_value(x).reshape(len(x), 3, HEADS, C // HEADS).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(query, key, value, mask)
    return module.out(mixed.transpose(0, 1).reshape(len(x), C))


@pytest.mark.parametrize("bias", [None, (), (HEADS,)], ids=["no bias", "shared bias", "bias per head"])
def test_mesh_attention_against_dense(bias: tuple[int, ...] | None, surfaces: list[Operators]) -> None:
    """Compares values, and gradients for the features, the bias and all parameters."""
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS).double()
    for operators in (*surfaces, with_k_ring(surfaces[0], 2), collate(surfaces)):
        pattern = operators.neighborhood or operators.gradient.pattern
        x = random(operators.num_vertices, C).requires_grad_()
        if bias is None:
            found, mask, leaves = module(x, pattern), dense_mask(pattern), [x]
        else:
            values = random(*bias, pattern.nnz, seed=1).requires_grad_()
            mask = torch.full((*bias, *pattern.shape), -torch.inf, dtype=torch.float64)
            mask[..., pattern.row_indices.long(), pattern.column_indices.long()] = values
            found, leaves = module(x, pattern, bias=values), [x, values]
        assert_same(found, dense_mesh_attention(module, x, mask), [*leaves, *module.parameters()])


def test_an_empty_neighborhood_gives_the_bias() -> None:
    module = MeshAttention(C, HEADS)
    pattern = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 1]), 2)
    out = module(torch.randn(2, C), pattern)
    torch.testing.assert_close(out[0], module.out.bias)
    assert not torch.allclose(out[1], module.out.bias)


def test_low_precision(surfaces: list[Operators]) -> None:
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS).to(DEVICE)
    pattern, x = surfaces[0].gradient.pattern.to(DEVICE), torch.randn(surfaces[0].num_vertices, C, device=DEVICE)
    exact = module(x, pattern)
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = module(x, pattern)
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded.float() - exact) < 0.03 * torch.linalg.norm(exact)


def test_bad_arguments_of_mesh_attention(surfaces: list[Operators]) -> None:
    attention, sphere, x = MeshAttention(C), surfaces[0], torch.zeros(42, 3)
    pattern = sphere.gradient.pattern
    for heads, message in ((0, "at least 1, got 0"), (3, "8 channels, got 3"), (-2, "at least 1, got -2")):
        refused(ValueError, message, MeshAttention, C, heads)
    message = r"got Tensor; write for example operators\.gradient\.pattern"
    refused(TypeError, message, attention, torch.zeros(42, C), torch.ones(42, 42))
    message = r"x should be a tensor, got list; convert it with torch\.tensor"
    refused(TypeError, message, attention, [[0.0] * C] * 42, pattern)
    message = r"positions should be a tensor, got ndarray; convert it with torch\.from_numpy"
    refused(TypeError, message, with_nearest, sphere, x.numpy(), 2)
    refused(TypeError, r"k should be an integer, got 2\.0", with_k_ring, sphere, 2.0)
    refused(ValueError, r"\(5, 5\), shape is \(42, 42\)", attention, torch.zeros(5, C), pattern)
    refused(ValueError, "got -1", with_k_ring, sphere, -1)
    refused(ValueError, "got 0", with_nearest, sphere, x, 0)
    refused(ValueError, r"\(42, 3\), shape is \(41, 3\)", with_nearest, sphere, x[1:], 2)


def test_network_with_attention(surfaces: list[Operators]) -> None:
    """A batch of meshes with different neighborhoods agrees with the meshes one by one."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=C, blocks=2, attention_heads=HEADS).eval()
    each = [with_k_ring(surfaces[0], 2), surfaces[1], with_nearest(surfaces[2], torch.randn(42, 3), 4)]
    packed = collate(each)
    x = random(packed.num_vertices, 3).float()
    together = model(x, packed)
    apart = torch.cat([model(f, o) for f, o in zip(x.split(list(packed.lengths)), each, strict=True)])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, model(x, collate(surfaces)), atol=1e-3)
    together.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiles_to_one_graph(surfaces: list[Operators]) -> None:
    """Beside implicit diffusion. Also for batches of other sizes, which become symbols in the graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=C, blocks=1, attention_heads=HEADS, diffusion="implicit", dropout=0.0).double()
    for block in model.blocks:
        torch.nn.init.constant_(block.diffusion.time, 0.1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for operators in (collate(surfaces[:2]), with_k_ring(collate(surfaces), 2)):
        operators = operators.to(dtype=torch.float64)
        x = random(operators.num_vertices, 3)
        results = []
        for network in (compiled, model):
            out = network(x, operators)
            results.append([out, *torch.autograd.grad(out.sum(), list(model.parameters()))])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_batches_keep_neighborhoods(surfaces: list[Operators]) -> None:
    assert collate(surfaces).neighborhood is None
    each = [with_k_ring(surfaces[0], 2), surfaces[1], with_k_ring(surfaces[2], 0)]
    packed = collate(each)
    expected = [o.neighborhood or o.gradient.pattern for o in each]
    assert torch.equal(
        dense_mask(packed.neighborhood), torch.block_diag(*(dense_mask(p).int() for p in expected)).bool()
    )
    # A private name, because only it shows that collate assembles the transpose instead of sorting later.
    assert packed.neighborhood._transpose is not None
    for part, pattern in zip(packed.split(), expected, strict=True):
        assert torch.equal(dense_mask(part.neighborhood), dense_mask(pattern))
    moved = packed.to("meta").neighborhood
    assert moved is not None
    assert moved.indices.device.type == "meta"


def test_k_ring(surfaces: list[Operators]) -> None:
    """Compares with powers of the adjacency matrix."""
    for operators in (surfaces[1], collate(surfaces)):
        step = dense_mask(operators.gradient.pattern).double() + torch.eye(operators.num_vertices)
        for k in range(4):
            assert torch.equal(dense_mask(with_k_ring(operators, k).neighborhood), step.matrix_power(k) > 0)


def test_nearest(surfaces: list[Operators]) -> None:
    packed = collate(surfaces)
    positions = random(packed.num_vertices, 3)
    for k in (1, 5, 40):
        expected = []
        for points in positions.split(list(packed.lengths)):
            near = torch.cdist(points, points).argsort(1)[:, :k]
            expected.append(torch.zeros(len(points), len(points)).scatter(1, near, 1.0))
        found = dense_mask(with_nearest(packed, positions, k).neighborhood)
        assert torch.equal(found, torch.block_diag(*expected).bool())
    coincident = dense_mask(with_nearest(surfaces[0], torch.zeros(42, 3), 3).neighborhood)
    assert coincident.diagonal().all()
    assert (coincident.sum(1) == 3).all()
