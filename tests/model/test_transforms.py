"""The meta device, `torch.func` over ensembles of weights, `torch.export`, FSDP: they work, or the error says how."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import trimesh
from refusals import refused
from shapes import ellipsoid
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from two_ranks import run_ranks

from diffnet import DiffusionNet, Operators, collate, precompute
from diffnet.options import DiffusionMode

OPTIONS = {
    "spectral": {},
    "sparse-gradient": {"gradient": "sparse"},
    "implicit": {"diffusion": "implicit"},
    "mlp_norm": {"mlp_norm": "layer"},
    "attention": {"attention_heads": 2},
    "tokens": {"global_tokens": 2},
    "faces": {"outputs_at": "faces"},
    "global-mean": {"outputs_at": "global_mean"},
}


@pytest.fixture(scope="module")
def operators() -> Operators:
    return collate([precompute(trimesh.creation.icosphere(n), k=8) for n in (0, 1)])


def networks(count: int, **options: Any) -> list[DiffusionNet]:
    torch.manual_seed(0)
    models = [DiffusionNet(3, 4, width=8, blocks=2, backend="torch", **options).eval() for _ in range(count)]
    for model in models:
        for block in model.blocks:
            torch.nn.init.uniform_(block.diffusion.time, 0.01, 0.3)
    return models


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("on_basis", [False, True], ids=["plain", "with-gradient-evecs"])
def test_meta_device(operators: Operators, options: dict[str, Any], on_basis: bool) -> None:
    """Shapes and dtypes of outputs and gradients, without memory for values."""
    (model,) = networks(1, **options)
    own = operators.with_gradient_evecs() if on_basis else operators
    expected = model(torch.zeros(54, 3), own)
    own = collate(own.split())  # without the transposed pattern that the call above found
    model = model.train().to("meta")
    out = model(torch.zeros(54, 3, device="meta"), own.to("meta"))
    assert out.is_meta
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta and p.grad.shape == p.shape for p in model.parameters())


def test_edges_on_the_meta_device(operators: Operators) -> None:
    (model,) = networks(1, outputs_at="edges")
    x = torch.zeros(54, 3, device="meta")
    fresh = collate(operators.split())
    refused(ValueError, r"no faces to find edges of; read \.edges before", model.to("meta"), x, fresh.to("meta"))
    count = len(fresh.edges)
    assert model(x, fresh.to("meta")).shape == (count, 4)


def ensemble(models: list[DiffusionNet], x: Tensor, operators: Operators, randomness: str = "error") -> Tensor:
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    call = vmap(lambda p, b: functional_call(models[0], (p, b), (x, operators)), randomness=randomness)
    return call(parameters, buffers)


@pytest.mark.parametrize("on_basis", [False, True], ids=["sparse", "basis"])
@pytest.mark.parametrize("name", ["spectral", "attention", "mlp_norm", "faces", "global-mean"])
def test_ensembles_and_derivatives(operators: Operators, name: str, on_basis: bool) -> None:
    """vmap, forward mode and second derivatives, for "torch", and the first two for "auto", too."""
    models = [model.double() for model in networks(2, **OPTIONS[name])]
    x, direction = torch.randn(54, 3, dtype=torch.float64), torch.randn(54, 3, dtype=torch.float64)
    own = operators.to(dtype=torch.float64)
    own = own.with_gradient_evecs() if on_basis else own
    expected = torch.stack([model(x, own) for model in models])
    assert not torch.allclose(expected[0], expected[1])
    forward = torch.func.jvp(lambda y: models[0](y, own), (x,), (direction,))[1]
    second = torch.func.jvp(torch.func.grad(lambda y: models[0](y, own).square().sum()), (x,), (direction,))[1]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(models[0](leaf, own).square().sum(), leaf, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first, leaf, direction)[0], second)
    for backend in ("torch", "auto"):
        for module in (module for model in models for module in model.modules() if hasattr(module, "backend")):
            module.backend = backend
        torch.testing.assert_close(ensemble(models, x, own), expected)
        _, found = torch.func.jvp(lambda y: models[0](y, own), (x,), (direction,))
        torch.testing.assert_close(found, forward)
    near = [models[0](x + h * direction, own) for h in (1e-6, -1e-6)]
    torch.testing.assert_close((near[0] - near[1]) / 2e-6, forward, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_several_gradients_at_once(operators: Operators, name: str) -> None:
    """They work on a CPU, or the message names the networks that have them."""
    (model,) = networks(1, **OPTIONS[name])
    x, parameters = torch.randn(54, 3), list(model.parameters())
    for backend in ("auto", "torch"):
        for module in (module for module in model.modules() if hasattr(module, "backend")):
            module.backend = backend
        out = model(x, operators)
        grads = torch.randn(2, *out.shape)
        gradients = partial(torch.autograd.grad, out, parameters, retain_graph=True, allow_unused=True)
        if name == "implicit" or (name == "attention" and backend == "auto"):
            message = 'one gradient at a time.*networks of backend="torch" without implicit diffusion do'
            refused(RuntimeError, message, gradients, grads, is_grads_batched=True)
            continue
        each = zip(*map(gradients, grads), strict=True)
        for found, expected in zip(gradients(grads, is_grads_batched=True), each, strict=True):
            if found is not None:
                torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
                assert not found.requires_grad
        jacobian = torch.autograd.functional.jacobian(lambda y: model(y, operators)[:1], x, vectorize=True)
        torch.testing.assert_close(torch.func.jacrev(lambda y: model(y, operators)[:1])(x), jacobian)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_in_training(operators: Operators, dropout: float) -> None:
    """`torch.func.grad` agrees with autograd and changes no parameter. Negative times count as 0."""
    (model,) = networks(1, dropout=dropout)
    model.train()
    model.blocks[0].diffusion.time.data[:4] *= -1
    x, own = torch.randn(54, 3), operators.with_gradient_evecs()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(1)
    grads = torch.func.grad(lambda p: functional_call(model, p, (x, own)).square().sum())(parameters)
    assert (parameters["blocks.0.diffusion.time"] < 0).sum() == (model.blocks[0].diffusion.time < 0).sum() == 4
    torch.manual_seed(1)
    model(x, own).square().sum().backward()
    assert (model.blocks[0].diffusion.time == 0).sum() == 4
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_ensembles_in_training(operators: Operators) -> None:
    models, own = [model.train() for model in networks(2, dropout=0.5)], operators.with_gradient_evecs()
    x = torch.randn(54, 3)
    refused(RuntimeError, "use the 'same' or 'different' randomness flags", ensemble, models, x, own)
    outs = ensemble([models[0]] * 2, x, own, randomness="different")
    assert not torch.equal(*outs)
    assert torch.equal(*ensemble([models[0]] * 2, x, own, randomness="same"))


@pytest.mark.parametrize("kind", ["implicit in eval", "implicit in training", "kernels"])
def test_what_has_no_batching_rule(operators: Operators, kind: str) -> None:
    """Implicit diffusion and kernels. The error names the networks that have one."""
    models = networks(2, **OPTIONS["spectral" if kind == "kernels" else "implicit"])
    for module in (module for model in models for module in model.train("training" in kind).modules()):
        if kind == "kernels" and hasattr(module, "backend"):
            module.backend = "triton"
    advice = 'backend="torch" and "auto" do' if kind == "kernels" else "one gradient at a time"
    with pytest.raises(RuntimeError, match=f"transforms of torch.func.*{advice}"):
        ensemble(models, torch.randn(54, 3), operators.with_gradient_evecs())


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """Surfaces of 42, 162 and 192 vertices, whose edges are known."""
    shapes = (trimesh.creation.icosphere(1), trimesh.creation.icosphere(2), trimesh.creation.torus(1, 0.3, 16, 12))
    operators = [precompute(shape, k=8) for shape in shapes]
    for each in operators:
        _ = each.edges
    return operators


def features(operators: Operators) -> Tensor:
    return operators.normals.contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 2},
        {"outputs_at": "global_mean"},
        {"outputs_at": "faces"},
        {"outputs_at": "edges"},
        {"attention_heads": 2},
        {"gradient": "spectral", "mlp_norm": "rms", "last_activation": torch.sigmoid},
        {"diffusion": "implicit"},
    ],
    ids=lambda options: " ".join(options),  # names alone, because the text of a function differs between processes
)
def test_export_with_operators(
    meshes: list[Operators], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "torch.export.dynamic_shapes")
    torch.manual_seed(0)
    network = DiffusionNet(3, 5, **{"width": 16, "blocks": 1, **options}).eval()
    more = torch.export.AdditionalInputs()
    for operators in meshes[:2]:
        more.add((features(operators), operators))
    with torch.no_grad():
        exported = torch.export.export(network, (features(meshes[0]), meshes[0]), dynamic_shapes=more).module()
        for operators in meshes:
            expected = network(features(operators), operators)
            torch.testing.assert_close(exported(features(operators), operators), expected, rtol=1e-5, atol=1e-5)


def test_messages_of_what_cannot_be_exported(meshes: list[Operators]) -> None:
    batch = collate(meshes)
    with pytest.raises(ValueError, match="takes operators of one mesh, got a batch of 3"):
        torch.export.export(DiffusionNet(3, 5, width=8, blocks=1).eval(), (features(batch), batch))
    unread = precompute(trimesh.creation.icosphere(1), k=8)
    network = DiffusionNet(3, 5, width=8, blocks=1, outputs_at="edges").eval()
    refused(ValueError, r"read operators\.edges once before", torch.export.export, network, (features(unread), unread))


Batch = tuple[Tensor, Operators, Tensor]


def timed(diffusion: DiffusionMode) -> DiffusionNet:
    """Two blocks whose learned times begin near 0."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=2, diffusion=diffusion, dropout=0).double()
    for block in model.blocks:
        block.diffusion.time.data = torch.linspace(0, 0.02, 8, dtype=torch.float64)
    return model


def train(model: DiffusionNet, name: str, batches: list[list[Batch]]) -> int:
    """Take 12 steps with the mean loss of batches. Returns how many times were below 0 after a step."""
    # The diagonal of A_im has gradient 0 up to rounding, which a small eps would turn into steps.
    chosen = {"lr": 0.03, "eps": 1e-4} if name == "AdamW" else {"lr": 0.5, "momentum": 0.9}
    optimizer, below = getattr(torch.optim, name)(model.parameters(), **chosen), 0
    for step in range(12):
        optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(model(x, o), y) for x, o, y in batches[step % len(batches)]]
        torch.stack(losses).mean().backward()
        optimizer.step()
        below += sum(int((block.diffusion.time < 0).sum()) for block in model.blocks)
    return below


@pytest.mark.skipif(os.name != "posix", reason="copies")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_times_that_fall_below_zero_under_fsdp(diffusion: DiffusionMode, name: str, tmp_path: Path) -> None:
    """The network alone is divided over ranks, or its blocks, too. It learns what one process learns."""
    rng, batches = torch.Generator().manual_seed(0), []
    for seed in range(0, 6, 2):
        operators = [precompute(ellipsoid(seed + rank, 1), k=8).to(dtype=torch.float64) for rank in range(2)]
        drawn = torch.randn(2, 42, 3, dtype=torch.float64, generator=rng), torch.randint(4, (2, 42), generator=rng)
        batches.append(list(zip(drawn[0], operators, drawn[1], strict=True)))
    model = timed(diffusion)
    assert train(model, name, batches) > 0
    run_ranks(_train_shares, diffusion, name, batches, tmp_path)
    for weights in torch.load(tmp_path / "weights.pt"):
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-14)


def _train_shares(rank: int, diffusion: DiffusionMode, name: str, batches: list[list[Batch]], folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    every = []
    for with_blocks in (False, True):
        model = timed(diffusion)
        for module in [*(model.blocks if with_blocks else []), model]:
            fully_shard(module)
        train(model, name, [[parts[rank]] for parts in batches])
        every.append([p.detach().full_tensor() for p in model.parameters()])
    if rank == 0:
        torch.save(every, folder / "weights.pt")
    torch.distributed.destroy_process_group()
