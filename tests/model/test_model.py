"""`DiffusionNet`: shapes, batches, modes, precisions, compilation, in plain PyTorch and on the Triton kernels."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trimesh
from float64 import DEVICE
from kernel_accuracy import relative
from refusals import refused
from shapes import ellipsoid
from torch import Tensor, nn

from diffnet import (
    DiffusionNet,
    DiffusionNetBlock,
    ImplicitDiffusion,
    LearnedTimeDiffusion,
    Operators,
    SpatialGradientFeatures,
    block,
    collate,
    graphed,
    precompute,
    shared_launches,
)
from diffnet.benchmarks.harness.captured import CapturedStep
from diffnet.data.samples import output_rows
from diffnet.ops import SparseMatrix
from diffnet.ops.common import launcher
from diffnet.ops.definition import BlockArguments

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
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
    return torch.randn(operators.num_vertices, channels, generator=torch.Generator().manual_seed(seed)).to(
        operators.device
    )


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
    """Outputs, and gradients, which add up."""
    model = network(outputs_at=outputs_at, gradient=mode).eval()
    parameters = list(model.parameters())
    x = [features(o, seed=i) for i, o in enumerate(meshes)]
    together = model(torch.cat(x), collate(meshes))
    # A cloud has no faces and edges. Networks with outputs there refuse it, and it adds no rows to a batch.
    single = [
        (f, o) for f, o in zip(x, meshes, strict=True) if len(o.faces) > 0 or outputs_at not in ("faces", "edges")
    ]
    apart = torch.cat([model(f, o) for f, o in single])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(out.sum(), parameters) for out in (together, apart))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_outputs_at_several_places(meshes: list[Operators], tmp_path: Path) -> None:
    """They are those of networks with outputs at one place, also from a file, and the rows of each mesh in a batch."""
    at = ["faces", "vertices", "global_mean", "faces", "vertices"]
    network(outputs_at=at).save(file := tmp_path / "network.safetensors")
    model, surfaces = DiffusionNet.load(file), [o for o in meshes if len(o.faces)]
    packed = collate(surfaces)
    outputs = model(x := features(packed), packed)
    for values, place, columns in zip(
        outputs, ("vertices", "faces", "global_mean"), ([1, 4], [0, 3], [2]), strict=True
    ):
        torch.testing.assert_close(values, DiffusionNet.load(file, outputs_at=place)(x, packed)[:, columns])
    each = [output_rows(model(part, o), at, o) for part, o in zip(packed.unpack(x), surfaces, strict=True)]
    rows = output_rows(outputs, model.outputs_at, packed)
    torch.testing.assert_close(rows, torch.cat(each), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert (~rows.isnan()).sum(0).tolist() == [len(packed.faces), len(x), len(surfaces), len(packed.faces), len(x)]
    refused(ValueError, "vertices, faces, .* for each of 5 channels, got", network, outputs_at=["faces"])


def test_both_gradient_modes_agree(meshes: list[Operators]) -> None:
    packed = collate(meshes).to(dtype=torch.float64)
    x = features(packed).double()
    outputs = {}
    for mode in MODES:
        model = network(gradient=mode).double().eval()
        out = model(x, packed)
        outputs[mode] = [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]
    torch.testing.assert_close(*outputs.values(), rtol=1e-9, atol=1e-9)


def test_auto_uses_the_basis_if_present(meshes: list[Operators], monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = []
    original = block.diffusion_block

    def noted(x: Tensor, arguments: BlockArguments, *rest: Any) -> Tensor:
        patterns.append(arguments.pattern)
        return original(x, arguments, *rest)

    monkeypatch.setattr(block, "diffusion_block", noted)
    model = network()
    model(features(meshes[0]), meshes[0])
    model(features(meshes[0]), meshes[0].with_gradient_evecs())
    assert patterns == [meshes[0].gradient.pattern] * 2 + [None] * 2


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
    assert str(SpatialGradientFeatures(3)) == "SpatialGradientFeatures(3, rotation=True)"
    for layer in (diffusion, diffusion.train(), ImplicitDiffusion(3)):
        assert str(layer).endswith("Diffusion(3)")
        layer.time.data[0] = -0.1
        assert layer.learned_time()[0] == 0
        assert layer.time[0] < 0
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


@pytest.mark.parametrize("options", [{}, {"diffusion": "implicit"}, {"outputs_at": "global_mean"}], ids=str)
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float64"), ("float64", "float32")], ids=str)
def test_the_features_decide_the_dtype(meshes: list[Operators], dtypes: tuple[str, str], options: Any) -> None:
    """A network is a part of one in its dtype, whatever that of the operators is."""
    of_features, of_operators = (getattr(torch, name) for name in dtypes)
    operators, x = meshes[0].to(of_operators), features(meshes[0], 8).to(of_features)
    modules = [DiffusionNet(8, 2, width=8, blocks=1, **options), DiffusionNetBlock(8), LearnedTimeDiffusion(8)]
    assert {module.to(of_features)(x, operators).dtype for module in modules} == {of_features}


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
    """For packed batches of three sizes, and for a single mesh."""
    torch._dynamo.reset()
    model = network(gradient=mode, dropout=0.0, blocks=1).to(device, torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for operators in (collate(meshes[:2]), collate(meshes), collate([*meshes, meshes[0]]), meshes[2]):
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
    refused(ValueError, f"{name} should be one of {choices}, got 'dense'", network, **{name: "dense"})


@pytest.fixture(scope="module")
def operators() -> Operators:
    batch = collate([precompute(trimesh.creation.icosphere(0), k=8) for _ in range(2)])
    return batch.with_gradient_evecs().to(DEVICE)


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        pytest.param({}, "torch", id="spectral-torch"),
        pytest.param({}, "compiled", id="spectral-compiled"),
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
    backend, is_compiled = ("torch", True) if backend == "compiled" else (backend, False)
    model = DiffusionNet(3, 4, width=8, blocks=1, dropout=0.0, backend=backend, **options).to(DEVICE)
    x = torch.randn(operators.num_vertices, 3, device=DEVICE)
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.copy_(torch.linspace(-0.1, 0.1, 8))  # the first forward sets some times to 0
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    (run(x, operators).mean() + run(x, operators).square().mean()).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x, operators).mean().backward()
    model(x, operators).square().mean().backward()
    torch.testing.assert_close(together, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)
    assert all((block.diffusion.time >= 0).all() for block in model.blocks)


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
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module")
def packed() -> Operators:
    """A sphere of 42 vertices and a point cloud of 12."""
    sphere, cloud = trimesh.creation.icosphere(1), trimesh.creation.icosahedron().vertices
    return collate([precompute(sphere, k=10), precompute((cloud, None), k=10)])


small = partial(network, width=8, blocks=1)


def loss_and_gradients(model: DiffusionNet, x: Tensor, operators: Operators) -> list[Tensor]:
    out = model(x, operators)
    return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        *(
            {"gradient": mode, **options}
            for mode in MODES
            for options in ({}, {"gradient_rotation": False}, {"gradient_rotation": "swapped"}, {"mlp_hidden": []})
        ),
        {"gradient_features": False},
        {"blocks": 2},
    ],
    ids=str,
)
def test_kernels_agree(packed: Operators, options: dict[str, Any], device: str) -> None:
    plain = small(backend="torch", **options).eval().double()
    expected = loss_and_gradients(plain, features(packed).double(), packed.to(dtype=torch.float64))
    fused = small(backend="triton", **options).eval()
    fused.load_state_dict(plain.state_dict())
    got = loss_and_gradients(fused.to(device), features(packed).to(device), packed.to(device))
    assert all(relative(a, b) < 1e-4 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float16),
        *(pytest.param("cuda", d, marks=pytest.mark.gpu) for d in (torch.float16, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(packed: Operators, mode: str, device: str, dtype: torch.dtype) -> None:
    plain = with_decided_relus(small(backend="torch", gradient=mode)).eval().double()
    expected = loss_and_gradients(plain, features(packed).double(), packed.to(dtype=torch.float64))
    fused = with_decided_relus(small(backend="triton", gradient=mode)).eval().to(device)
    with torch.autocast(device, dtype):
        got = loss_and_gradients(fused, features(packed).to(device), packed.to(device))
    assert got[0].dtype == dtype
    assert all(g.dtype == torch.float32 for g in got[1:])
    assert all(relative(a, b) < 0.05 for a, b in zip(got, expected, strict=True))


PARTS: list[dict[str, Any]] = [
    {},
    {"diffusion": "implicit"},
    {"mlp_norm": "layer"},
    {"attention_heads": 2},
    {"global_tokens": 2},
    {"pair_attention": 1},
    {"vectors": 1},
]


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_dtypes_of_features_and_weights(packed: Operators, options: dict[str, Any]) -> None:
    """The more accurate of both decides. Autocast leaves float64 alone, and converts the rest."""
    x, model = features(packed).double(), small(**options, dropout=0.0).eval()
    accurate = copy.deepcopy(model).double()
    expected = accurate(x, packed)
    is_vector = "vectors" in options  # whose weights decide
    assert expected.dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(accurate(x, packed), expected, rtol=1e-12, atol=1e-12)
        assert model(x.float(), packed).dtype == (torch.float32 if is_vector else torch.bfloat16)
    wide = model(x, packed)
    assert wide.dtype == (torch.float32 if is_vector else torch.float64)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-4, atol=1e-4)
    assert model(x.bfloat16(), packed).dtype == torch.float32
    assert copy.deepcopy(model).bfloat16()(x.bfloat16(), packed).dtype == torch.bfloat16


def with_decided_relus(model: DiffusionNet) -> DiffusionNet:
    """Move all sums away from 0, where rounding could flip a ReLU and change gradients by more than the rounding."""
    with torch.no_grad():
        for block in model.blocks:
            for layer in block.mlp.layers[:2]:
                layer.bias.copy_(torch.tensor([4.0, -4.0]).repeat(4))
    return model


def test_the_basis_is_rounded_once(packed: Operators) -> None:
    """Rounding the basis beforehand and rounding it in the network give bitwise equal outputs."""
    fused = small(backend="triton", gradient="spectral").eval()
    pushed = packed.with_gradient_evecs()
    rounded = pushed.with_basis_dtype(torch.float16)
    assert rounded.evecs.dtype == rounded.gradient_evecs.dtype == torch.float16
    assert rounded.mass.dtype == rounded.evals.dtype == torch.float32
    assert rounded.with_basis_dtype(torch.float16) is rounded
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(fused(features(packed), pushed), fused(features(packed), rounded))


class TanhMLP(nn.Module):
    """A network for a block that the kernels do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, inputs: Sequence[Tensor], residual: Tensor) -> Tensor:
        return self.layers(torch.cat(list(inputs), -1)) + residual


@pytest.mark.parametrize("options", [{}, {"gradient_features": False}, {"global_tokens": 2}])
def test_stages_of_a_block(packed: Operators, options: dict[str, Any]) -> None:
    """With the MLP, they give the output."""
    torch.manual_seed(0)
    block, x = DiffusionNetBlock(4, dropout=0.0, **options), torch.randn(packed.num_vertices, 4)
    modulation = torch.zeros(len(packed), 8) if "global_tokens" in options else None
    diffused, features, output = block.stages(x, packed, modulation)
    assert (features is None) == (options.get("gradient_features") is False)
    torch.testing.assert_close(output, block(x, packed, modulation))
    parts = [x, diffused] if features is None else [x, diffused, features]  # new tokens and zeros change nothing
    torch.testing.assert_close(block.mlp(parts, residual=x), output, rtol=1e-4, atol=1e-4)


def test_a_block_with_another_mlp(packed: Operators) -> None:
    """A module assigned to `block.mlp` replaces the MLP on every backend."""
    plain, fused = (
        small(backend="torch", gradient="spectral").eval(),
        small(backend="triton", gradient="spectral").eval(),
    )
    before = fused(features(packed), packed)
    for plain_block, fused_block in zip(plain.blocks, fused.blocks, strict=True):
        plain_block.mlp = fused_block.mlp = TanhMLP()
    after = fused(features(packed), packed)
    assert relative(after, before) > 1e-2
    assert relative(after, plain(features(packed), packed)) < 1e-5


def test_dropout_of_the_fused_layers(packed: Operators) -> None:
    """Dropout acts in training only, with other zeros in every step. A seed repeats them."""
    model = small(backend="triton", gradient="spectral", dropout=0.5)
    x = features(packed)
    torch.manual_seed(3)
    first = model(x, packed)
    assert not torch.equal(model(x, packed), first)
    torch.manual_seed(3)
    assert torch.equal(model(x, packed), first)
    model.eval()
    assert torch.equal(model(x, packed), model(x, packed))


@pytest.mark.parametrize(
    ("device", "compiler"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_keeps_the_operations_whole(packed: Operators, mode: str, device: str, compiler: str) -> None:
    """torch.compile traces one graph that contains our operators, and its gradients agree."""
    torch._dynamo.reset()
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.update(str(node.target) for node in graph.graph.nodes if "diffnet" in str(node.target))
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)  # type: ignore[attr-defined]

    model = small(backend="triton", gradient=mode, dropout=0.0).to(device)
    x, operators = features(packed).to(device), packed.to(device)
    expected = loss_and_gradients(model, x, operators)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for a, b in zip(loss_and_gradients(compiled, x, operators), expected, strict=True):  # type: ignore[arg-type]
        assert relative(a, b) < 1e-5
    if mode == "spectral":
        # On a GPU, the operators remember the gradients of the basis from the call before.
        prepares = {"spmm"} if device == "cpu" else set()
        steps = {"project", "diffuse", "spectral_gradient_features", "mlp"}
        assert {name.split(".")[1] for name in seen} == steps | prepares


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layers", [1, 3])
def test_outputs_change_in_place(layers: int, backend: str, device: str) -> None:
    """Of a network and of a block. Gradients are those of new tensors."""
    operators = precompute(trimesh.creation.icosahedron(), k=4).to(device)
    options: Any = {"backend": backend, "gradient": "spectral", "dropout": 0.0, "mlp_hidden": [8] * (layers - 1)}
    model = DiffusionNet(3, 5, width=8, blocks=1, **options).to(device)
    x, parameters = features(operators), list(model.parameters())
    out = model(x, operators)
    positive = out > 0
    expected = torch.autograd.grad((out / 2).masked_fill(positive, 1.0).square().sum(), parameters, retain_graph=True)
    out /= 2
    out[positive] = 1.0
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), parameters), expected)
    hidden = model.blocks[0](torch.randn(12, 8, device=device), operators)
    hidden += 1
    hidden.sum().backward()


def train_step(model: DiffusionNet, x: Tensor, operators: Operators) -> Callable[[], Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, operators).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_steps_do_not_wait_for_the_gpu_and_can_be_captured(packed: Operators, mode: str) -> None:
    operators = packed.to("cuda").with_gradient_evecs() if mode == "spectral" else packed.to("cuda")
    losses = []
    for wrap in (lambda step: step, CapturedStep):
        model = small(backend="auto", gradient=mode, dropout=0.0).to("cuda")
        step = wrap(train_step(model, features(operators), operators))
        losses.append([step().item() for _ in range(6)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(set(losses[1])) == 6
    step = train_step(small(backend="auto", gradient=mode).to("cuda"), features(operators), operators)
    step()  # compiles kernels and sorts the pattern's transpose
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def compiled_networks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    # Compiling needs a GPU, and nothing public tells that it is wanted.
    monkeypatch.setattr(shared_launches, "_compile", lambda network, features, operators: found.append(network))
    return found


def call(network: DiffusionNet, operators: Operators, **changes: Any) -> None:
    values = {"is_cuda": True, "requires_grad": False, "dtype": torch.float32, "device": torch.device("cuda", 0)}
    shared_launches.compile_before_first_call(network, SimpleNamespace(**(values | changes)), operators)  # type: ignore[arg-type]


def test_kernels_are_compiled_once_for_each_kind_of_call(compiled_networks: list[Any], meshes: list[Operators]) -> None:
    network, other = DiffusionNet(3, 2, width=8, blocks=1), DiffusionNet(3, 2, width=8, blocks=1)
    for each in (network, network, other, network):
        call(each, meshes[0])
    assert compiled_networks == [network, other]
    network.eval()
    call(network, meshes[0])
    with torch.no_grad():
        call(network, meshes[0])
    call(network, meshes[0])
    assert compiled_networks == [network, other, network, network]


def test_nothing_is_compiled_on_the_cpu_with_hooks_or_twice(
    compiled_networks: list[Any], meshes: list[Operators], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, hooked = DiffusionNet(3, 2, width=8, blocks=1), DiffusionNet(3, 2, width=8, blocks=1)
    call(network, meshes[0], is_cuda=False)
    hooked.blocks[0].register_forward_hook(lambda *arguments: None)
    call(hooked, meshes[0])
    monkeypatch.setattr(shared_launches, "compiles_only", lambda: True)
    call(network, meshes[0])
    monkeypatch.setattr(shared_launches, "compiles_only", launcher.compiles_only)
    call(network, meshes[0])
    assert compiled_networks == []


@pytest.mark.gpu
def test_the_first_step_is_like_others(meshes: list[Operators]) -> None:
    """Compiling before the first call changes no gradients, no random numbers and no values."""
    torch.manual_seed(0)
    network = DiffusionNet(3, 2, width=16, blocks=1).cuda()
    moved, outs = meshes[0].to("cuda"), []
    for _ in range(2):
        torch.manual_seed(1)
        out = network(moved.frames[:, 2], moved)
        assert all(p.grad is None for p in network.parameters())
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("options", "with_graphs"),
    [
        pytest.param({}, False, id="eager"),
        pytest.param({}, True, id="graphed"),
        pytest.param({"gradient": "sparse"}, False, id="sparse-eager"),
        pytest.param({"gradient": "sparse"}, True, id="sparse-graphed"),
        pytest.param({"diffusion": "implicit"}, False, id="implicit"),
        pytest.param({"attention_heads": 2}, False, id="attention"),
    ],
)
def test_training_steps_on_another_gpu_than_the_current_one(options: dict[str, Any], with_graphs: bool) -> None:
    """They give what plain PyTorch gives on the CPU, and leave the current device as it is.

    The second step launches kernels that the first one has compiled.
    """
    meshes = [trimesh.creation.icosphere(n) for n in (1, 2)]
    operators = collate([precompute(mesh, k=16) for mesh in meshes])
    features = torch.randn(operators.num_vertices, 3)
    plain = DiffusionNet(3, 5, width=16, blocks=2, dropout=0.0, initial_times="spread", backend="torch", **options)
    model = DiffusionNet(**plain.architecture | {"backend": "auto"})
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    model.to("cuda:1")
    if with_graphs:
        graphed(model, first_visits=0)
    expected = plain(features, operators)
    expected.square().mean().backward()
    with torch.cuda.device(0):
        there, x = operators.to("cuda:1"), features.to("cuda:1")
        for _ in range(2):
            model.zero_grad()
            out = model(x, there)
            out.square().mean().backward()
            assert torch.cuda.current_device() == 0
            assert relative(out, expected) <= 1e-4
            for (name, found), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert found.grad is not None
                assert found.grad.device == torch.device("cuda:1")
                assert reference.grad is not None
                assert relative(found.grad, reference.grad) <= 1e-4, name
