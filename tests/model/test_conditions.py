"""Conditions of meshes and tokens of whole meshes: definitions, kernels, batches, graphs and compilation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import DEVICES, network, with_graphs
from kernel_accuracy import relative
from refusals import refused
from torch import Tensor, nn

from diffnet import DiffusionNet, GlobalTokens, Operators, collate, precompute
from diffnet.modulation import modulated_after_tokens

BOTH: dict[str, Any] = {"condition_channels": 2, "global_tokens": 3}


@pytest.fixture(scope="module")
def packed() -> Operators:
    """A mesh of two components and a sphere."""
    two = trimesh.util.concatenate([trimesh.creation.box().apply_translation([0, 0, z]) for z in (0, 5)])
    return collate([precompute(mesh, k=6) for mesh in (two, trimesh.creation.icosphere(1))])


def arguments(operators: Operators) -> tuple[Tensor, Operators, Tensor]:
    """Features, operators and conditions."""
    torch.manual_seed(1)
    features, conditions = (torch.randn(n, c) for n, c in ((operators.num_vertices, 3), (len(operators), 2)))
    return features.to(operators.device), operators, conditions.to(operators.device)


def randomized(**options: Any) -> DiffusionNet:
    model = network(blocks=2, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("options", [{"condition_channels": 2}, BOTH], ids=str)
def test_new_layers_change_nothing(packed: Operators, options: dict[str, Any]) -> None:
    plain, model = network(blocks=2), network(blocks=2, **options)
    if "global_tokens" in options:  # they draw random numbers
        plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    x, _, conditions = arguments(packed)
    found = model(x, packed, conditions)
    assert torch.equal(found, plain(x, packed))
    found.square().sum().backward()
    assert [block.tokens is not None for block in model.blocks] == [False, "global_tokens" in options]
    learns = [model.modulation.weight, model.modulation.bias, *(b.tokens.out for b in model.blocks if b.tokens)]
    assert all(bool((p.grad != 0).any()) for p in learns)


def test_definitions(packed: Operators) -> None:
    model = randomized(**BOTH)
    tokens, modulation = model.blocks[1].tokens, model.modulation
    x, conditions = torch.randn(packed.num_vertices, 8), torch.randn(2, 2)
    expected, scaled = [], []
    for rows, operators, c in zip(packed.unpack(x), packed.split(), conditions, strict=True):
        w, m = torch.softmax(tokens.share(rows), 1), operators.mass[:, None]
        z = torch.stack([(m * w[:, n : n + 1] * rows).sum(0) / (m * w[:, n : n + 1]).sum() for n in range(3)])
        q, k, v = tokens.query_key_value(z).split(8, 1)
        expected.append(rows + w @ (torch.softmax(q @ k.T / 8**0.5, 1) @ v @ tokens.out.T))
        gamma, beta = (modulation.weight[1] @ c + modulation.bias[1]).split(8)
        scaled.append((1 + gamma) * rows + beta)
    torch.testing.assert_close(tokens(x, packed), torch.cat(expected), rtol=1e-5, atol=1e-5)
    found = modulated_after_tokens(x, packed, None, modulation(conditions, packed)[1], "torch")
    torch.testing.assert_close(found, torch.cat(scaled), rtol=1e-5, atol=1e-5)


def test_tokens_reach_other_components_and_no_other_mesh(packed: Operators) -> None:
    for tokens, reached in ((0, 8), (3, 16)):
        model = randomized(global_tokens=tokens)
        x = torch.randn(packed.num_vertices, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x, packed)[0].sum(), x)
        assert grad.abs().amax(1).nonzero()[:, 0].tolist() == list(range(reached))


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_and_batches_agree(packed: Operators, device: str) -> None:
    """Outputs and all gradients of kernels, of compiled networks and of single meshes are those of float64."""

    def results(model: DiffusionNet, batches: list[Any]) -> list[Tensor]:
        out = torch.cat([model(*batch) for batch in batches])
        return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]

    model, kernels = (randomized(backend=backend, **BOTH) for backend in ("torch", "triton"))
    kernels.load_state_dict(model.state_dict())
    x, _, c = arguments(packed)
    expected = results(copy.deepcopy(model).double(), [(x.double(), packed.to(dtype=torch.float64), c.double())])
    for other, batches in (
        (model, list(zip(packed.unpack(x), packed.split(), c.split(1), strict=True))),
        (torch.compile(model, backend="aot_eager"), [(x, packed, c)]),
        (kernels.to(device), [(x.to(device), packed.to(device), c.to(device))]),
    ):
        assert all(relative(a.cpu(), b) < 1e-4 for a, b in zip(results(other, batches), expected, strict=True))


SIZES = [(8, 3, True), (24, 5, False), (20, 0, True), (40, 17, True), (8, 40, False)]  # channels, tokens, modulation


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_layers_are_one_node(
    packed: Operators, sizes: tuple[int, int, bool], dtype: torch.dtype, bound: float, device: str
) -> None:
    """Of few tokens. Outputs and all gradients are those of float64, also with a mesh that has no area."""
    channels, count, modulates = sizes
    mass = packed.mass.clone()
    mass[packed.lengths[0] :] = 0

    def results(backend: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
        torch.manual_seed(2)
        tokens = GlobalTokens(channels, count, backend) if count else None
        layers = nn.ModuleList([tokens] if count else [])
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=0.3)
        layers.to(device, dtype)
        sizes = (len(mass), channels), (2, 2 * channels)
        x, coefficients = (torch.randn(size).to(device, dtype).requires_grad_() for size in sizes)
        operators = replace(packed, mass=mass).to(device, dtype=torch.promote_types(dtype, torch.float32))
        out = modulated_after_tokens(x, operators, tokens, coefficients if modulates else None, backend)
        assert (type(out.grad_fn).__name__ == "_NodeBackward") == (backend == "triton" and count <= 32)
        leaves = [x, *([coefficients] if modulates else []), *layers.parameters()]
        return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))]

    expected = results("torch", torch.float64, "cpu")
    assert all(relative(a.cpu(), b) < bound for a, b in zip(results("triton", dtype, device), expected, strict=True))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_graphs_read_new_conditions(device: str) -> None:
    plain, operators = randomized(**BOTH).to(device), precompute(trimesh.creation.icosphere(1), k=6).to(device)
    model, (x, _, c) = with_graphs(plain, device), arguments(operators)
    for conditions in (c, 2 * c):
        found, expected = model(x, operators, conditions=conditions), plain(x, operators, conditions)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bad_conditions(packed: Operators) -> None:
    model, x = network(condition_channels=2), torch.zeros(packed.num_vertices, 3)
    refused(ValueError, r"write model\(features, operators, conditions\) of shape \(2, 2\)", model, x, packed)
    refused(ValueError, "conditions should have shape", model, x, packed, torch.zeros(1, 2))
    refused(TypeError, "conditions should be", model, x, packed, torch.zeros(2, 2, dtype=torch.int64))
    refused(ValueError, "the network takes no conditions", network(), x, packed, torch.zeros(2, 2))


def test_attention_in_pairs() -> None:
    """Each mesh reads from the other one of its pair alone, a new layer changes nothing, and files keep the layers."""
    meshes = [precompute(trimesh.creation.icosphere(n), k=8) for n in (0, 1, 1, 0)]
    x = torch.randn(108, 3, generator=torch.Generator().manual_seed(0))
    new = network(blocks=2, pair_attention=2)
    plain = network(blocks=2)
    plain.load_state_dict({name: new.state_dict()[name] for name in plain.state_dict()})
    assert torch.equal(new(x, collate(meshes)), plain(x, collate(meshes)))
    model = randomized(pair_attention=1).eval()
    out = model(x, collate(meshes))
    torch.testing.assert_close(out[:54], model(x[:54], collate(meshes[:2])))
    swapped = model(torch.cat([x[12:54], x[:12]]), collate(meshes[1::-1]))
    torch.testing.assert_close(torch.cat([swapped[42:], swapped[:42]]), out[:54])
    other = model(torch.cat([x[:12], 2 * x[12:54]]), collate(meshes[:2]))
    assert not torch.allclose(other[:12], out[:12])
    layer, y, ends = model.pairs[0], model.first(x[:54]), ((0, 12), (12, 54))
    heads = layer.query_key_value(layer.norm(y)).reshape(54, 3, 4, -1)
    (q, _, _), (_, k, v) = (heads[a:b].unbind(1) for a, b in ends)
    scores = torch.einsum("ihc,jhc->hij", q, k) / q.shape[-1] ** 0.5
    read = torch.einsum("hij,jhc->ihc", scores.softmax(2), v).flatten(1)
    expected = y[:12] + layer.mlp(torch.cat([layer.norm(y[:12]), read], 1))
    torch.testing.assert_close(layer(y, collate(meshes[:2]))[:12], expected)
    refused(ValueError, "needs an even number of meshes, got 1", model, x[:12], meshes[0])
    refused(ValueError, "pair_attention should be at most 2, got 3", network, blocks=2, pair_attention=3)
