"""Block-sparse modules against dense ones."""

from __future__ import annotations

import pytest
import torch
import trimesh
from float64 import DEVICE, random
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import (
    BlockSparseAttention,
    BlockSparseConv2d,
    BlockSparseLinear,
    Operators,
    collate,
    precompute,
)
from diffnet.geometry import patches
from diffnet.ops import BlockPattern

pytestmark = pytest.mark.usefixtures("one_thread")


def layout(*shape: int, seed: int = 0) -> Tensor:
    """A random mask of blocks. No input reaches the second row of outputs."""
    mask = random(*shape, seed=seed) > -0.3
    mask[..., 1, :] = False
    return mask


def assert_same(module: nn.Module, ours: Tensor, expected: Tensor, x: Tensor) -> None:
    """Compare values, and gradients for the input and all parameters."""
    leaves = [x, *module.parameters()]
    weights = random(*expected.shape, seed=9)
    results = [[out, *torch.autograd.grad((out * weights).sum(), leaves)] for out in (ours, expected)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_linear(bias: bool) -> None:
    torch.manual_seed(0)
    module = BlockSparseLinear(40, 50, layout(4, 3), block=16, bias=bias).double()
    if bias:
        nn.init.normal_(module.bias)
    for shape in ((7, 40), (2, 3, 40), (40,), (0, 40)):
        x = random(*shape).requires_grad_()
        dense = module.pattern.to_dense(module.weight)[0]
        assert_same(module, module(x), F.linear(x, dense, module.bias), x)
    with pytest.raises(ValueError, match=r"40 features, shape is \(7, 41\)"):
        module(torch.zeros(7, 41))


def test_initial_weights_are_distributed_as_in_a_linear_layer() -> None:
    torch.manual_seed(0)
    module = BlockSparseLinear(512, 512, torch.ones(16, 16, dtype=torch.bool))
    dense = nn.Linear(512, 512)
    assert module.weight.abs().max() <= 512**-0.5
    assert module.weight.detach().std() == pytest.approx(dense.weight.std().item(), rel=0.02)
    half = torch.ones(16, 16, dtype=torch.bool).tril()
    out = BlockSparseLinear(512, 512, half)(torch.randn(2000, 512)).detach()
    expected = dense(torch.randn(2000, 512)).std().item()
    assert out.std() == pytest.approx(expected, rel=0.1)


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
    assert_same(module, module(x), F.conv2d(x, weight, module.bias, **options), x)  # type: ignore[arg-type]


def test_convolution_arguments_of_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) or \(3, 3, 3, 2\), shape is \(2, 2\)"):
        BlockSparseConv2d(20, 33, 3, layout(2, 2), block=16)
    module = BlockSparseConv2d(20, 33, 3, layout(3, 2), block=16)
    with pytest.raises(ValueError, match=r"\(N, 20, …, …\), shape is \(20, 9, 9\)"):
        module(torch.zeros(20, 9, 9))


def dense_attention(module: BlockSparseAttention, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    projected = module.query_key_value(x).unflatten(-1, (3, module.heads, -1)).movedim(-3, 0).transpose(-2, -3)
    query, key, value = projected
    extra = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    mixed = F.scaled_dot_product_attention(query, key, value, extra if bias is None else extra + bias)
    return module.out(mixed.transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("mask_per_head", [False, True], ids=["shared_mask", "mask_per_head"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_masks"])
def test_attention(mask_per_head: bool, extras: bool) -> None:
    torch.manual_seed(0)
    n = 37
    mask = random(*((2,) if mask_per_head else ()), 3, 3) > -0.5
    mask[..., 0] = True
    pattern = BlockPattern.from_mask(mask, 16, n, n)
    module = BlockSparseAttention(8, 2, length=n if extras else None).double()
    x = random(3, n, 8).requires_grad_()
    there = pattern.to_dense(torch.ones(pattern.values_shape)) > 0
    if not extras:
        assert_same(module, module(x, pattern), dense_attention(module, x, there), x)
        return
    assert module.relative_bias is not None
    nn.init.normal_(module.relative_bias)
    keys, attention = random(3, n, seed=2) > -1, random(n, n, seed=3) > -1
    keys[:, 0], attention[:, 0] = True, True
    for given in (attention, pattern.sample(attention[None])):
        bias = module.relative_bias[:, torch.arange(n) - torch.arange(n)[:, None] + n - 1]
        expected = dense_attention(module, x, there & attention & keys[:, None, None, :], bias)
        ours = module(x, pattern, key_padding_mask=keys, attention_mask=given)
        assert_same(module, ours, expected, x)


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
        assert_same(module, module(x, pattern, bias=bias), expected, bias)
    bias = random(*whole.values_shape, seed=3).requires_grad_()
    if length is None:
        expected = dense_attention(module, x, there, whole.to_dense(bias))
        assert_same(module, module(x, whole, bias=bias), expected, bias)


def test_kernels_agree() -> None:
    pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16, 20, 20).to(DEVICE)
    for build, x, more in (
        (lambda backend: BlockSparseLinear(20, 33, layout(3, 2), block=16, backend=backend), torch.randn(5, 20), ()),
        (
            lambda backend: BlockSparseConv2d(20, 33, 3, layout(3, 2), block=16, backend=backend),
            torch.randn(1, 20, 4, 4),
            (),
        ),
        (lambda backend: BlockSparseAttention(8, 2, backend=backend), torch.randn(20, 8), (pattern,)),
        (lambda backend: BlockSparseAttention(8, 2, length=20, backend=backend), torch.randn(20, 8), (pattern,)),
    ):
        on_kernels, plain = build("triton").to(DEVICE), build("torch").to(DEVICE)
        plain.load_state_dict(on_kernels.state_dict())
        x = x.to(DEVICE)
        torch.testing.assert_close(on_kernels(x, *more), plain(x, *more), rtol=1e-5, atol=1e-5)


def test_attention_dropout() -> None:
    torch.manual_seed(0)
    module = BlockSparseAttention(8, 2, dropout=0.5)
    pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    x = torch.randn(32, 8)
    with torch.no_grad():
        dropped = torch.stack([module(x, pattern) for _ in range(500)])
        exact = module.eval()(x, pattern)
        assert not torch.equal(dropped[0], dropped[1])
        assert torch.equal(exact, module(x, pattern))
        assert torch.linalg.norm(dropped.mean(0) - exact) < 0.1 * torch.linalg.norm(exact)


def test_attention_arguments_of_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match="8 channels, got 3"):
        BlockSparseAttention(8, 3)
    pattern = BlockPattern.from_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match=r"\(4, 30, 30\) or \(1, 30, 30\), shape is \(1, 32, 32\)"):
        BlockSparseAttention(8)(torch.zeros(30, 8), pattern)


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
    assert_same(module, ours, dense_attention(module, x, sees), x)


def test_modules_train_move_and_load() -> None:
    torch.manual_seed(0)
    mask = layout(2, 2)

    def build() -> nn.Sequential:
        return nn.Sequential(
            BlockSparseConv2d(3, 24, 3, mask[:, :1], block=16, padding=1), nn.Flatten(), BlockSparseLinear(
                24 * 16, 20, layout(2, 24), block=16
            )
        )  # fmt: skip

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
