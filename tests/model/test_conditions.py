"""Conditions of meshes and tokens of whole meshes: definitions, kernels, batches, graphs and compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import DEVICES, network, with_graphs
from kernel_accuracy import relative
from refusals import refused
from torch import Tensor, nn

from diffnet import DiffusionNet, Operators, collate, precompute

OPTIONS = ({"condition_channels": 2}, {"global_tokens": 3}, {"condition_channels": 2, "global_tokens": 3})


@pytest.fixture(scope="module")
def packed() -> Operators:
    """A mesh of two components and a sphere."""
    two = trimesh.util.concatenate([trimesh.creation.box().apply_translation([0, 0, z]) for z in (0, 5)])
    return collate([precompute(mesh, k=6) for mesh in (two, trimesh.creation.icosphere(1))])


def arguments(model: DiffusionNet, operators: Operators, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Features, operators and, for a network that has them, conditions."""
    torch.manual_seed(1)
    features = torch.randn(operators.num_vertices, 3, dtype=dtype, device=operators.device)
    conditions = torch.randn(len(operators), 2, dtype=dtype, device=operators.device)
    return [features, operators, *([conditions] if model.condition_channels else [])]


def randomized(**options: Any) -> DiffusionNet:
    model = network(blocks=2, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_new_layers_change_nothing(packed: Operators, options: dict[str, Any]) -> None:
    plain, model = network(blocks=2), network(blocks=2, **options)
    if "global_tokens" in options:  # they draw random numbers
        plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    found = model(*arguments(model, packed))
    assert torch.equal(found, plain(*arguments(plain, packed)))
    found.square().sum().backward()
    block = model.blocks[0]
    learns = [block.tokens.out] if block.tokens else [block.modulation.weight, block.modulation.bias]
    assert all(bool((p.grad != 0).any()) for p in learns)


def test_definitions(packed: Operators) -> None:
    """The layers are the formulas of their docstrings, mesh by mesh."""
    model = randomized(condition_channels=2, global_tokens=3)
    tokens, modulation = model.blocks[0].tokens, model.blocks[0].modulation
    x, conditions = torch.randn(packed.num_vertices, 8), torch.randn(2, 2)
    expected, scaled = [], []
    for rows, operators, c in zip(packed.unpack(x), packed.split(), conditions, strict=True):
        w, m = torch.softmax(tokens.share(rows), 1), operators.mass[:, None]
        z = torch.stack([(m * w[:, n : n + 1] * rows).sum(0) / (m * w[:, n : n + 1]).sum() for n in range(3)])
        q, k, v = tokens.query_key_value(z).split(8, 1)
        expected.append(rows + w @ (torch.softmax(q @ k.T / 8**0.5, 1) @ v @ tokens.out.T))
        gamma, beta = (modulation.weight @ c + modulation.bias).split(8)
        scaled.append((1 + gamma) * rows + beta)
    torch.testing.assert_close(tokens(x, packed), torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(modulation(x, conditions, packed), torch.cat(scaled), rtol=1e-5, atol=1e-5)


def test_tokens_reach_other_components_and_no_other_mesh(packed: Operators) -> None:
    for tokens, reached in ((0, 8), (3, 16)):
        model = randomized(global_tokens=tokens)
        x = torch.randn(packed.num_vertices, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x, packed)[0].sum(), x)
        assert grad.abs().amax(1).nonzero()[:, 0].tolist() == list(range(reached))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernels_and_batches_agree(packed: Operators, options: dict[str, Any], device: str) -> None:
    """Outputs and all gradients of kernels, of compiled networks and of single meshes are those of float64."""

    def results(model: DiffusionNet, batches: list[list[Any]]) -> list[Tensor]:
        out = torch.cat([model(*batch) for batch in batches])
        return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]

    model = randomized(backend="torch", **options)
    double = copy.deepcopy(model).double()
    expected = results(double, [arguments(double, packed.to(dtype=torch.float64), torch.float64)])
    x, _, *c = (t.float() if isinstance(t, Tensor) else t for t in arguments(double, packed, torch.float64))
    alone = zip(packed.unpack(x), packed.split(), *(each.split(1) for each in c), strict=True)
    kernels = randomized(backend="triton", **options).to(device)
    kernels.load_state_dict(model.state_dict())
    for other, batches in (
        (model, list(alone)),
        (torch.compile(model, backend="aot_eager"), [(x, packed, *c)]),
        (kernels, [(x.to(device), packed.to(device), *(each.to(device) for each in c))]),
    ):
        found = results(other, batches)
        assert all(relative(a.cpu(), b) < 1e-4 for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_graphs(device: str) -> None:
    """They read new conditions, which may be given by name."""
    plain = randomized(condition_channels=2, global_tokens=3).to(device)
    model = with_graphs(plain, device)
    operators = precompute(trimesh.creation.icosphere(1), k=6).to(device)
    x, _, c = arguments(plain, operators)
    for conditions in (c, 2 * c):
        expected = plain(x, operators, conditions)
        torch.testing.assert_close(model(x, operators, conditions=conditions), expected, rtol=1e-4, atol=1e-4)


def test_bad_conditions(packed: Operators) -> None:
    model, x = network(condition_channels=2), torch.zeros(packed.num_vertices, 3)
    refused(ValueError, r"write model\(features, operators, conditions\) of shape \(2, 2\)", model, x, packed)
    refused(ValueError, "conditions should have shape", model, x, packed, torch.zeros(1, 2))
    refused(TypeError, "conditions should be", model, x, packed, torch.zeros(2, 2, dtype=torch.int64))
    refused(ValueError, "the network takes no conditions", network(), x, packed, torch.zeros(2, 2))
