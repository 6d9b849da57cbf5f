"""`MeshAttention` against dense attention, and the neighborhoods that it attends to."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
import trimesh
from float64 import DEVICE, random
from torch import Tensor
from torch.nn import functional as F

from diffnet import DiffusionNet, MeshAttention, Operators, collate, precompute
from diffnet.geometry import with_k_ring, with_nearest
from diffnet.ops import Pattern

C, HEADS = 8, 2

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """A sphere, a torus with a vertex that no face uses, and a point cloud."""
    torus = trimesh.creation.torus(1, 0.4, 6, 4)
    loose = np.concatenate([[[5.0, 0, 0]], torus.vertices]), torus.faces + 1
    cloud = trimesh.creation.icosphere(1).vertices * [1, 0.7, 0.5]
    return [precompute(m, k=6) for m in (trimesh.creation.icosphere(1), loose, (cloud, None))]


def mask_of(pattern: Pattern) -> Tensor:
    mask = torch.zeros(pattern.shape, dtype=torch.bool)
    mask[pattern.row_indices.long(), pattern.column_indices.long()] = True
    return mask


def dense_attention(module: MeshAttention, x: Tensor, mask: Tensor) -> Tensor:
    query, key, value = module.query_key_value(x).reshape(len(x), 3, HEADS, C // HEADS).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(query, key, value, mask)
    return module.out(mixed.transpose(0, 1).reshape(len(x), C))


def test_agrees_with_dense_attention(meshes: list[Operators]) -> None:
    """Compares values, and gradients for the features and all parameters."""
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS).double()
    for operators in (*meshes, with_k_ring(meshes[0], 2), collate(meshes)):
        pattern = operators.neighborhood or operators.gradient.pattern
        x = random(operators.num_vertices, C).requires_grad_()
        leaves = [x, *module.parameters()]
        weights = random(operators.num_vertices, C, seed=1)
        results = []
        for out in (module(x, pattern), dense_attention(module, x, mask_of(pattern))):
            results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads", [(), (HEADS,)], ids=["shared", "per head"])
def test_bias(heads: tuple[int, ...], meshes: list[Operators]) -> None:
    """Values and gradients, also for the bias."""
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS).double()
    pattern = meshes[0].gradient.pattern
    x = random(meshes[0].num_vertices, C)
    bias = random(*heads, pattern.nnz, seed=1).requires_grad_()
    dense = torch.full((*heads, *pattern.shape), -torch.inf, dtype=torch.float64)
    dense[..., pattern.row_indices.long(), pattern.column_indices.long()] = bias
    leaves = [bias, *module.parameters()]
    weights = random(*x.shape, seed=2)
    results = []
    for out in (module(x, pattern, bias=bias), dense_attention(module, x, dense)):
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_kernels_agree(meshes: list[Operators]) -> None:
    torch.manual_seed(0)
    pattern, x = meshes[0].gradient.pattern.to(DEVICE), torch.randn(meshes[0].num_vertices, C, device=DEVICE)
    on_kernels, plain = (MeshAttention(C, HEADS, backend=backend).to(DEVICE) for backend in ("triton", "torch"))
    plain.load_state_dict(on_kernels.state_dict())
    torch.testing.assert_close(on_kernels(x, pattern), plain(x, pattern), rtol=1e-5, atol=1e-5)


def test_an_empty_neighborhood_gives_the_bias() -> None:
    module = MeshAttention(C, HEADS)
    pattern = Pattern(torch.tensor([0, 0, 2]), torch.tensor([0, 1]), 2)
    out = module(torch.randn(2, C), pattern)
    torch.testing.assert_close(out[0], module.out.bias)
    assert not torch.allclose(out[1], module.out.bias)


def test_dropout_of_weights(meshes: list[Operators]) -> None:
    """The remaining weights are scaled up, so the mean over many draws is the output without dropout."""
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS, dropout=0.5)
    pattern, x = meshes[0].gradient.pattern, torch.randn(meshes[0].num_vertices, C)
    with torch.no_grad():
        dropped = torch.stack([module(x, pattern) for _ in range(500)])
        assert not torch.equal(dropped[0], dropped[1])
        exact = module.eval()(x, pattern)
        assert torch.equal(exact, module(x, pattern))
        assert torch.linalg.norm(dropped.mean(0) - exact) < 0.1 * torch.linalg.norm(exact)


def test_low_precision(meshes: list[Operators]) -> None:
    torch.manual_seed(0)
    module = MeshAttention(C, HEADS).to(DEVICE)
    pattern, x = meshes[0].gradient.pattern.to(DEVICE), torch.randn(meshes[0].num_vertices, C, device=DEVICE)
    exact = module(x, pattern)
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = module(x, pattern)
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded.float() - exact) < 0.03 * torch.linalg.norm(exact)


def test_bad_arguments(meshes: list[Operators]) -> None:
    for heads, message in ((0, "at least 1, got 0"), (3, "8 channels, got 3"), (-2, "at least 1, got -2")):
        with pytest.raises(ValueError, match=message):
            MeshAttention(C, heads)
    with pytest.raises(TypeError, match=r"got Tensor; write for example operators\.gradient\.pattern"):
        MeshAttention(C)(torch.zeros(42, C), torch.ones(42, 42))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x should be a tensor, got list; convert it with torch\.tensor"):
        MeshAttention(C)([[0.0] * C] * 42, meshes[0].gradient.pattern)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"positions should be a tensor, got ndarray; convert it with torch\.from_numpy"
    ):
        with_nearest(meshes[0], torch.zeros(42, 3).numpy(), 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"k should be an integer, got 2\.0"):
        with_k_ring(meshes[0], 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(5, 5\), shape is \(42, 42\)"):
        MeshAttention(C)(torch.zeros(5, C), meshes[0].gradient.pattern)
    with pytest.raises(ValueError, match="got -1"):
        with_k_ring(meshes[0], -1)
    with pytest.raises(ValueError, match="got 0"):
        with_nearest(meshes[0], torch.zeros(42, 3), 0)
    with pytest.raises(ValueError, match=r"\(42, 3\), shape is \(41, 3\)"):
        with_nearest(meshes[0], torch.zeros(41, 3), 2)


def test_network_with_attention(meshes: list[Operators]) -> None:
    """A batch of meshes with different neighborhoods agrees with the meshes one by one."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=C, blocks=2, attention_heads=HEADS).eval()
    each = [with_k_ring(meshes[0], 2), meshes[1], with_nearest(meshes[2], torch.randn(42, 3), 4)]
    packed = collate(each)
    x = random(packed.num_vertices, 3).float()
    together = model(x, packed)
    apart = torch.cat([model(f, o) for f, o in zip(x.split(list(packed.lengths)), each, strict=True)])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, model(x, collate(meshes)), atol=1e-3)
    together.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiles_to_one_graph(meshes: list[Operators]) -> None:
    """Beside implicit diffusion. Also for batches of other sizes, which become symbols in the graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=C, blocks=1, attention_heads=HEADS, diffusion="implicit", dropout=0.0).double()
    for block in model.blocks:
        torch.nn.init.constant_(block.diffusion.time, 0.1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for operators in (collate(meshes[:2]), with_k_ring(collate(meshes), 2)):
        operators = operators.to(dtype=torch.float64)
        x = random(operators.num_vertices, 3)
        results = []
        for network in (compiled, model):
            out = network(x, operators)
            results.append([out, *torch.autograd.grad(out.sum(), list(model.parameters()))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_batches_keep_neighborhoods(meshes: list[Operators]) -> None:
    assert collate(meshes).neighborhood is None
    each = [with_k_ring(meshes[0], 2), meshes[1], with_k_ring(meshes[2], 0)]
    packed = collate(each)
    assert packed.neighborhood is not None
    expected = [o.neighborhood or o.gradient.pattern for o in each]
    assert torch.equal(mask_of(packed.neighborhood), torch.block_diag(*(mask_of(p).int() for p in expected)).bool())
    # A private name, because only it shows that collate assembles the transpose instead of sorting later.
    assert packed.neighborhood._transpose is not None
    for part, pattern in zip(packed.split(), expected, strict=True):
        assert part.neighborhood is not None
        assert torch.equal(mask_of(part.neighborhood), mask_of(pattern))
    moved = packed.to("meta").neighborhood
    assert moved is not None
    assert moved.indices.device.type == "meta"


def test_k_ring(meshes: list[Operators]) -> None:
    """Compares with breadth-first search."""
    for operators in (meshes[1], collate(meshes)):
        edges = mask_of(operators.gradient.pattern)
        for k in range(4):
            expected = torch.zeros_like(edges)
            for start in range(len(edges)):
                distance, queue = {start: 0}, deque([start])
                while queue:
                    i = queue.popleft()
                    for j in edges[i].nonzero()[:, 0].tolist():
                        if j not in distance and distance[i] < k:
                            distance[j] = distance[i] + 1
                            queue.append(j)
                expected[start, list(distance)] = True
            found = with_k_ring(operators, k).neighborhood
            assert found is not None
            assert torch.equal(mask_of(found), expected)


def test_nearest(meshes: list[Operators]) -> None:
    packed = collate(meshes)
    positions = random(packed.num_vertices, 3)
    for k in (1, 5, 40):
        found = with_nearest(packed, positions, k).neighborhood
        assert found is not None
        expected = []
        for points in positions.split(list(packed.lengths)):
            near = torch.cdist(points, points).argsort(1)[:, :k]
            expected.append(torch.zeros(len(points), len(points)).scatter(1, near, 1.0))
        assert torch.equal(mask_of(found), torch.block_diag(*expected).bool())


def test_nearest_of_coincident_points(meshes: list[Operators]) -> None:
    found = with_nearest(meshes[0], torch.zeros(42, 3), 3).neighborhood
    assert found is not None
    mask = mask_of(found)
    assert mask.diagonal().all()
    assert (mask.sum(1) == 3).all()
