"""`DiffusionNet` in plain PyTorch: shapes, batches, modes, precisions, compilation."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import trimesh
from float64 import DEVICE
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, ImplicitDiffusion, LearnedTimeDiffusion, Operators, block, collate, precompute
from diffnet.ops import SparseMatrix

MODES = ("sparse", "spectral")


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """A sphere, a torus with fewer vertices than K, and a point cloud."""
    sphere, torus = trimesh.creation.icosphere(2), trimesh.creation.torus(1, 0.4, 6, 4)
    cloud = trimesh.creation.icosphere(2).vertices * [1, 0.7, 0.5]
    operators = [precompute(m, k=30) for m in (sphere, torus, (cloud, None))]
    assert operators[1].num_vertices < 30
    return operators


def features(operators: Operators, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(operators.num_vertices, channels, generator=torch.Generator().manual_seed(seed))


def network(**options: object) -> DiffusionNet:
    """A small network with a different, positive diffusion time for each channel."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, **{"width": 16, "blocks": 2, **options})  # type: ignore[arg-type]
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.uniform_(0.01, 0.3)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs_at", ["vertices", "faces", "edges", "global_mean"])
def test_packed_batch_is_its_meshes_one_by_one(meshes: list[Operators], outputs_at: str, mode: str) -> None:
    model = network(outputs_at=outputs_at, gradient=mode).eval()
    x = [features(o, seed=i) for i, o in enumerate(meshes)]
    together = model(torch.cat(x), collate(meshes))
    # A cloud has no faces and edges. Networks with outputs there refuse it, and it adds no rows to a batch.
    single = [
        (f, o) for f, o in zip(x, meshes, strict=True) if len(o.faces) > 0 or outputs_at not in ("faces", "edges")
    ]
    apart = torch.cat([model(f, o) for f, o in single])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_packed_batch_are_the_sum(meshes: list[Operators]) -> None:
    model = network().eval()
    x = [features(o, seed=i) for i, o in enumerate(meshes)]
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(torch.cat(x), collate(meshes)).sum(), parameters)
    apart = [torch.autograd.grad(model(f, o).sum(), parameters) for f, o in zip(x, meshes, strict=True)]
    for a, *b in zip(together, *apart, strict=True):
        torch.testing.assert_close(a, sum(b), rtol=1e-4, atol=1e-4)


def test_both_gradient_modes_agree(meshes: list[Operators]) -> None:
    packed = collate(meshes).to(dtype=torch.float64)
    x = features(packed).double()
    outputs = {}
    for mode in MODES:
        model = network(gradient=mode).double().eval()
        out = model(x, packed)
        outputs[mode] = [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]
    for a, b in zip(*outputs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_auto_uses_the_basis_if_present(meshes: list[Operators], monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = block.diffusion_and_gradient_features
    monkeypatch.setattr(
        block, "diffusion_and_gradient_features", lambda *given, **named: used.append(True) or original(*given, **named)
    )
    model = network()
    model(features(meshes[0]), meshes[0])
    assert not used
    model(features(meshes[0]), meshes[0].with_gradient_evecs())
    assert len(used) == 2


def test_without_rotation_orientation_does_not_matter(meshes: list[Operators]) -> None:
    """Mirrored tangent frames, as of a surface turned inside out, change the sign of g_y."""
    plain = meshes[0]
    mirrored_values = plain.gradient.values * torch.tensor([[1.0], [-1.0]])
    mirrored = replace(plain, gradient=SparseMatrix(plain.gradient.pattern, mirrored_values))
    x = features(plain)
    for rotation, same in ((False, True), (True, False)):
        model = network(gradient_rotation=rotation).eval()
        assert torch.allclose(model(x, plain), model(x, mirrored), atol=1e-5) is same


@pytest.mark.parametrize(("kind", "time"), [(LearnedTimeDiffusion, 0.2), (ImplicitDiffusion, 0.5)])
def test_diffusion_conserves_the_mean_and_smooths(meshes: list[Operators], kind: Any, time: float) -> None:
    operators = meshes[0]
    diffusion = kind(3).eval()
    torch.nn.init.constant_(diffusion.time, time)
    x = features(operators)
    out = diffusion(x, operators)
    torch.testing.assert_close(operators.mass @ out, operators.mass @ x, rtol=1e-4, atol=1e-4)
    assert out.std() < 0.5 * x.std()


def test_negative_diffusion_times_become_zero(meshes: list[Operators]) -> None:
    """Training sets them to 0, and they still receive a gradient. In eval mode the parameter is unchanged."""
    diffusion = LearnedTimeDiffusion(3)
    with torch.no_grad():
        diffusion.time.copy_(torch.tensor([-0.1, 0.0, 0.1]))
    diffusion.eval()
    at_eval = diffusion(features(meshes[0]), meshes[0])
    assert diffusion.time[0] < 0
    diffusion.train()
    out = diffusion(features(meshes[0]), meshes[0])
    torch.testing.assert_close(out, at_eval)
    assert diffusion.time[0] == 0
    out.square().sum().backward()
    assert (diffusion.time.grad != 0).all()


def train_steps(model: torch.nn.Module, batches: list[Operators], device: str, steps: int = 8) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        operators = batches[step % len(batches)]
        with torch.autocast(device, torch.bfloat16):
            out = model(features(operators).to(device), operators)
        loss = torch.nn.functional.cross_entropy(out.float(), torch.arange(len(out), device=device) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_trains_under_autocast(meshes: list[Operators], mode: str) -> None:
    model = network(gradient=mode, dropout=0.0)
    losses = train_steps(model, [collate(meshes)], "cpu", steps=15)
    assert losses[-1] < losses[0]
    exact = model.eval()(features(meshes[0]), meshes[0])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(features(meshes[0]), meshes[0])
    assert rounded.dtype == torch.bfloat16
    assert torch.linalg.norm(rounded.float() - exact) < 0.05 * torch.linalg.norm(exact)


no_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
# "aot_eager" traces as "inductor" does and skips its compiler, which takes most of the time on a CPU.
COMPILED = (
    pytest.param("cpu", "aot_eager", id="cpu-traced"),
    pytest.param("cpu", "inductor", id="cpu-compiled", marks=[no_compiler, pytest.mark.slow]),
    pytest.param("cuda", "inductor", id="cuda-compiled", marks=pytest.mark.gpu),
)


@pytest.mark.parametrize(("device", "backend"), COMPILED)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_agrees(meshes: list[Operators], mode: str, device: str, backend: str) -> None:
    """For packed batches of two sizes, and for a single mesh."""
    torch._dynamo.reset()
    model = network(gradient=mode, dropout=0.0, blocks=1).to(device, torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for operators in (collate(meshes[:2]), collate(meshes), meshes[2]):
        x, moved = features(operators).to(device, torch.float64), operators.to(device, torch.float64)
        torch.testing.assert_close(compiled(x, moved), model(x, moved), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("device", "backend"), COMPILED[1:])
@pytest.mark.parametrize("mode", MODES)
def test_trains_compiled(meshes: list[Operators], mode: str, device: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(network(gradient=mode).to(device), fullgraph=True, backend=backend)
    batches = [meshes[0], collate(meshes[:2]), collate(meshes), meshes[2]]
    losses = train_steps(compiled, [o.to(device) for o in batches], device)  # type: ignore[arg-type]
    assert all(torch.isfinite(torch.tensor(losses))), losses


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs_at", ["vertices", "faces", "edges", "global_mean"])
def test_gpu_agrees_with_cpu(meshes: list[Operators], mode: str, outputs_at: str) -> None:
    packed = collate(meshes).to(dtype=torch.float64)
    x = features(packed).double()
    results = []
    for device in ("cpu", "cuda"):
        model = network(gradient=mode, outputs_at=outputs_at).double().eval().to(device)
        out = model(x.to(device), packed.to(device))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_normalization_of_the_input_of_the_mlp(meshes: list[Operators], mode: str) -> None:
    packed = collate(meshes).with_gradient_evecs()
    model = network(mlp_norm="layer", gradient=mode).eval()
    first = model.blocks[0]
    seen: list[Tensor] = []
    first.mlp.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0]))
    model(features(packed), packed)
    (x,) = seen
    assert x.shape[1] == 3 * model.width
    torch.testing.assert_close(x.mean(1), torch.zeros(len(x)), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(1, correction=0), torch.ones(len(x)), atol=1e-2, rtol=0)


@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_initial_times(diffusion: str) -> None:
    spread = DiffusionNet(3, 5, width=16, blocks=2, diffusion=diffusion, initial_times="spread")
    times = spread.blocks[1].diffusion.time.detach()
    assert times.min() == pytest.approx(1e-4)
    assert times.max() == pytest.approx(1.0)
    ratios = times[1:] / times[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    assert not DiffusionNet(3, 5, width=16, diffusion=diffusion).blocks[1].diffusion.time.any()


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("initial_times", "zero, spread"),
        ("mlp_norm", "none, layer, rms"),
        ("gradient", "auto, spectral, sparse"),
        ("outputs_at", "vertices, faces, edges, global_mean"),
        ("backend", "auto, torch, triton"),
    ],
)
def test_unknown_choices_are_refused(name: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{name} should be one of {choices}, got 'dense'"):
        network(**{name: "dense"})


# ---- several forward passes before one backward pass, as siamese networks need them ----


@pytest.fixture(scope="module")
def operators() -> Operators:
    batch = collate([precompute(trimesh.creation.icosphere(0), k=8) for _ in range(2)])
    return batch.with_gradient_evecs().to(DEVICE)


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        pytest.param({}, "torch", id="spectral-torch"),
        pytest.param({}, "triton", id="spectral-triton"),
        pytest.param({"gradient": "sparse"}, "torch", id="sparse-gradient-torch"),
        pytest.param({"gradient": "sparse"}, "triton", id="sparse-gradient-triton"),
        pytest.param({"diffusion": "implicit"}, "torch", id="implicit-torch"),
        pytest.param({"diffusion": "implicit"}, "triton", id="implicit-triton", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_two_forwards_add_up(operators: Operators, options: dict[str, Any], backend: Any) -> None:
    """One backward of a sum of two losses gives the sum of the gradients of two backwards, in training mode."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=1, dropout=0.0, backend=backend, **options).to(DEVICE)
    x = torch.randn(operators.num_vertices, 3, device=DEVICE)
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.copy_(torch.linspace(-0.1, 0.1, 8))  # the first forward sets some times to 0
    (model(x, operators).mean() + model(x, operators).square().mean()).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x, operators).mean().backward()
    model(x, operators).square().mean().backward()
    for grad, parameter in zip(together, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)
    assert all((block.diffusion.time >= 0).all() for block in model.blocks)


def test_two_compiled_forwards(operators: Operators) -> None:
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=1, dropout=0.0, backend="torch").to(DEVICE)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(operators.num_vertices, 3, device=DEVICE)
    (compiled(x, operators).mean() + compiled(x, operators).square().mean()).backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- blocks that are computed again in the backward pass ----


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def step(network: DiffusionNet, features: Tensor, operators: Operators) -> tuple[list[Tensor], int]:
    """The outputs and all gradients, and the bytes that the backward pass keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(0)  # of dropout
    network.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = network(features, operators)
    outputs.square().mean().backward()
    return [outputs.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)], sum(kept.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_steps_are_the_same_and_keep_less(diffusion: str, dropout: float, device: str) -> None:
    operators = precompute(ellipsoid(0, 3), k=16).to(device)
    network = DiffusionNet(3, 4, width=32, blocks=4, dropout=dropout, diffusion=diffusion).to(device)
    features = torch.randn(operators.num_vertices, 3, device=device)
    expected, much = step(network, features, operators)
    network.recompute_activations = True
    found, little = step(network, features, operators)
    assert little < 0.6 * much
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
