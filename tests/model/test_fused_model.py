"""`DiffusionNet` on the Triton kernels: agreement with plain PyTorch, compilation, capture, no waiting for the GPU.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trimesh
from torch import Tensor, nn

from diffnet import DiffusionNet, Operators, collate, first_call, precompute
from diffnet.benchmarks.harness.captured import CapturedStep
from diffnet.ops.common import launcher

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
MODES = ("sparse", "spectral")


@pytest.fixture(scope="module")
def packed() -> Operators:
    """A sphere of 42 vertices and a point cloud of 12."""
    sphere, cloud = trimesh.creation.icosphere(1), trimesh.creation.icosahedron().vertices
    return collate([precompute(sphere, k=10), precompute((cloud, None), k=10)])


def network(backend: str, **options: Any) -> DiffusionNet:
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, **({"width": 8, "blocks": 1, "backend": backend} | options))
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.uniform_(0.01, 0.3)
    return model


def features(operators: Operators) -> Tensor:
    return torch.randn(operators.num_vertices, 3, generator=torch.Generator().manual_seed(0)).to(operators.device)


def loss_and_gradients(model: DiffusionNet, x: Tensor, operators: Operators) -> list[Tensor]:
    out = model(x, operators)
    return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float(torch.linalg.norm(a - b) / torch.linalg.norm(b))


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
    plain = network("torch", **options).eval().double()
    expected = loss_and_gradients(plain, features(packed).double(), packed.to(dtype=torch.float64))
    fused = network("triton", **options).eval()
    fused.load_state_dict(plain.state_dict())
    got = loss_and_gradients(fused.to(device), features(packed).to(device), packed.to(device))
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 1e-4


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float16),
        *(pytest.param("cuda", d, marks=pytest.mark.gpu) for d in (torch.float16, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(packed: Operators, mode: str, device: str, dtype: torch.dtype) -> None:
    plain = with_decided_relus(network("torch", gradient=mode)).eval().double()
    expected = loss_and_gradients(plain, features(packed).double(), packed.to(dtype=torch.float64))
    fused = with_decided_relus(network("triton", gradient=mode)).eval().to(device)
    with torch.autocast(device, dtype):
        got = loss_and_gradients(fused, features(packed).to(device), packed.to(device))
    assert got[0].dtype == dtype
    assert all(g.dtype == torch.float32 for g in got[1:])
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 0.05


def with_decided_relus(model: DiffusionNet) -> DiffusionNet:
    """Move all sums away from 0, where rounding could flip a ReLU and change gradients by more than the rounding."""
    with torch.no_grad():
        for block in model.blocks:
            for layer in block.mlp.layers[:2]:
                layer.bias.copy_(torch.tensor([4.0, -4.0]).repeat(4))
    return model


def test_the_basis_is_rounded_once(packed: Operators) -> None:
    """Rounding the basis beforehand and rounding it in the network give bitwise equal outputs."""
    fused = network("triton", gradient="spectral").eval()
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


def test_a_block_with_another_mlp(packed: Operators) -> None:
    """A module assigned to `block.mlp` replaces the MLP on every backend."""
    plain, fused = network("torch", gradient="spectral").eval(), network("triton", gradient="spectral").eval()
    before = fused(features(packed), packed)
    for plain_block, fused_block in zip(plain.blocks, fused.blocks, strict=True):
        plain_block.mlp = fused_block.mlp = TanhMLP()
    after = fused(features(packed), packed)
    assert relative(after, before) > 1e-2
    assert relative(after, plain(features(packed), packed)) < 1e-5


def test_dropout_of_the_fused_layers(packed: Operators) -> None:
    """Dropout acts in training only, with other zeros in every step. A seed repeats them."""
    model = network("triton", gradient="spectral", dropout=0.5)
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
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(compiler)(graph, inputs)  # type: ignore[attr-defined]
        return compiled

    model = network("triton", gradient=mode, dropout=0.0).to(device)
    x, operators = features(packed).to(device), packed.to(device)
    expected = loss_and_gradients(model, x, operators)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for a, b in zip(loss_and_gradients(compiled, x, operators), expected, strict=True):  # type: ignore[arg-type]
        assert relative(a, b) < 1e-5
    if mode == "spectral":
        # On a GPU, the operators remember the gradients of the basis from the call before.
        prepares = {"spmm"} if device == "cpu" else set()
        assert {name.split(".")[1] for name in seen} == {"diffusion_features", "mlp"} | prepares


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
def test_a_step_does_not_wait_for_the_gpu(packed: Operators, mode: str) -> None:
    operators = packed.to("cuda").with_gradient_evecs() if mode == "spectral" else packed.to("cuda")
    step = train_step(network("auto", gradient=mode).to("cuda"), features(operators), operators)
    step()  # compiles kernels and sorts the pattern's transpose
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_step_trains_as_an_eager_step_does(packed: Operators, mode: str) -> None:
    operators = packed.to("cuda").with_gradient_evecs() if mode == "spectral" else packed.to("cuda")
    losses = []
    for wrap in (lambda step: step, CapturedStep):
        model = network("auto", gradient=mode, dropout=0.0).to("cuda")
        step = wrap(train_step(model, features(operators), operators))
        losses.append([step().item() for _ in range(6)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(set(losses[1])) == 6


@pytest.mark.gpu
def test_dropout_differs_between_replays(packed: Operators) -> None:
    operators = packed.to("cuda").with_gradient_evecs()
    model, x = network("auto", gradient="spectral", dropout=0.5).to("cuda"), features(operators)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model(x, operators)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x, operators)
    outputs = []
    for _ in range(2):
        graph.replay()
        outputs.append(out.clone())
    assert not torch.equal(*outputs)


# ---- before the first call of a network on a GPU, its kernels are compiled ----


@pytest.fixture
def compiled_networks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The networks whose kernels were compiled_networks."""
    found: list[Any] = []
    monkeypatch.setattr(first_call, "_compile", lambda network, features, operators: found.append(network))
    return found


@pytest.fixture(scope="module")
def operators() -> Operators:
    return precompute(trimesh.creation.icosphere(1), k=4)


def call(network: DiffusionNet, operators: Operators, **changes: Any) -> None:
    values = {"is_cuda": True, "requires_grad": False, "dtype": torch.float32, "device": torch.device("cuda", 0)}
    first_call.compile_before_first_call(network, SimpleNamespace(**(values | changes)), operators)  # type: ignore[arg-type]


def test_once_for_each_kind_of_call(compiled_networks: list[Any], operators: Operators) -> None:
    network, other = DiffusionNet(3, 2, width=8, blocks=1), DiffusionNet(3, 2, width=8, blocks=1)
    for each in (network, network, other, network):
        call(each, operators)
    assert compiled_networks == [network, other]
    network.eval()
    call(network, operators)
    with torch.no_grad():
        call(network, operators)
    call(network, operators)
    assert compiled_networks == [network, other, network, network]


def test_not_on_the_cpu(compiled_networks: list[Any], operators: Operators) -> None:
    call(DiffusionNet(3, 2, width=8, blocks=1), operators, is_cuda=False)
    assert compiled_networks == []


def test_not_with_hooks_inside(compiled_networks: list[Any], operators: Operators) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    network.blocks[0].register_forward_hook(lambda *arguments: None)
    call(network, operators)
    assert compiled_networks == []


def test_not_while_kernels_are_compiled_already(
    compiled_networks: list[Any], operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    monkeypatch.setattr(first_call, "compiles_only", lambda: True)
    call(network, operators)
    monkeypatch.setattr(first_call, "compiles_only", launcher.compiles_only)
    call(network, operators)
    assert compiled_networks == []


@pytest.mark.gpu
def test_the_first_step_is_like_others(operators: Operators) -> None:
    """Compiling before the first call changes no gradients, no random numbers and no values."""
    torch.manual_seed(0)
    network = DiffusionNet(3, 2, width=16, blocks=1).cuda()
    moved, outs = operators.to("cuda"), []
    for _ in range(2):
        torch.manual_seed(1)
        out = network(moved.frames[:, 2], moved)
        assert all(p.grad is None for p in network.parameters())
        outs.append(out)
    assert torch.equal(*outs)
