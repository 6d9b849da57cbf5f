"""Layers with hooks, of another type or changed in other ways are called, as in a network without fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_accuracy import relative
from refusals import refused
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils._pytree import tree_map_only

from diffnet import DiffusionNet, LearnedTimeDiffusion, Operators, SpatialGradientFeatures

pytest.importorskip("triton")
C = 8
LINEAR = ("first", "last", "blocks.0.mlp.2")
LEARNED = ("blocks.0.diffusion", "blocks.0.gradient_features")
PLACES = (*LINEAR, *LEARNED, "blocks.0.mlp.dropout", "blocks.0.mlp", "blocks.0.attention")

Calls = list[None]
Change = Callable[[nn.Module, Calls], nn.Module | None]  # returns a module that takes the place of the given one


def hooked(register: str) -> Change:
    """A hook that scales what it may change: the output, the inputs or their gradients."""

    def change(module: nn.Module, calls: Calls) -> None:
        def hook(m: nn.Module, *values: Any) -> Any:
            if m is not module:
                return None
            calls.append(None)
            changed = values[-1 if register.endswith("forward_hook") else 0]
            return tree_map_only(Tensor, lambda x: 1.5 * x, changed, is_leaf=lambda value: isinstance(value, Operators))

        getattr(torch_modules if "module" in register else module, register)(hook)

    change.__name__ = register.removeprefix("register_")
    return change


HOOKS = [
    hooked(f"register_{kind}")
    for kind in (
        "forward_hook",
        "forward_pre_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
        "module_forward_hook",
    )
]


def patched_forward(module: nn.Module, calls: Calls) -> None:
    forward = module.forward

    def patched(*arguments: Any, **options: Any) -> Tensor:
        calls.append(None)
        return 1.5 * forward(*arguments, **options)

    module.forward = patched


def subclass(module: nn.Module, calls: Calls) -> None:
    class Scaled(type(module)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Tensor:
            calls.append(None)
            return 1.5 * super().forward(*arguments, **options)

    module.__class__ = Scaled


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, calls: Calls) -> None:
        super().__init__()
        self.module, self.calls = module, calls

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        self.calls.append(None)
        out: Tensor = self.module(*arguments, **options)
        return out.tanh()


def compiled(module: nn.Module, calls: Calls) -> None:
    torch._dynamo.reset()
    module.compile(backend="eager")
    call = module._compiled_call_impl
    assert call is not None

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return call(*arguments, **options)

    module._compiled_call_impl = counted


def learned(module: nn.Module) -> str:
    return {nn.Linear: "weight", LearnedTimeDiffusion: "time", SpatialGradientFeatures: "a_re"}[type(module)]


class Halved(nn.Module):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        return x / 2


def parametrization(module: nn.Module, calls: Calls) -> None:
    parametrize.register_parametrization(module, learned(module), Halved(calls))
    calls.clear()


def spectral_norm(module: nn.Module, calls: Calls) -> None:
    parametrizations.spectral_norm(module)


def hooked_weight_norm(module: nn.Module, calls: Calls) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        weight_norm(module)


def pruned(module: nn.Module, calls: Calls) -> None:
    prune.l1_unstructured(module, learned(module), amount=0.5)  # type: ignore[no-untyped-call]


ANYWHERE: list[Change] = [*HOOKS, patched_forward, subclass, Wrapper, compiled]
OF_PARAMETERS: list[Change] = [parametrization, pruned]
OF_WEIGHTS: list[Change] = [spectral_norm, hooked_weight_norm]
UNCOUNTED = (spectral_norm, hooked_weight_norm, pruned)
CASES = [
    *((place, change) for place in PLACES for change in ANYWHERE),
    *((place, change) for place in (*LINEAR, *LEARNED) for change in OF_PARAMETERS),
    *((place, change) for place in LINEAR for change in OF_WEIGHTS),
]
# On kernels, each change at one place and some changes at each place: `is_plain` decides the same for all. Attention
# runs in several operations on both backends.
ON_KERNELS = [c for c in CASES if c[0] == "last" or (c[1] in (HOOKS[0], HOOKS[3]) and c[0] != PLACES[-1])]
RUNS = [*((*case, "torch") for case in CASES), *((*case, "triton") for case in ON_KERNELS)]


@pytest.fixture(autouse=True)
def _without_global_hooks() -> Iterator[None]:
    yield
    torch_modules._global_forward_hooks.clear()


def network(backend: str, **options: Any) -> DiffusionNet:
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=C, blocks=1, backend=backend, **options)  # type: ignore[arg-type]
    model.blocks[0].diffusion.time.data.uniform_(0.05, 0.3)
    return model


def use(model: DiffusionNet, backend: str) -> None:
    for module in model.modules():
        if "backend" in vars(module):
            module.backend = backend


def computed(model: DiffusionNet, x: Tensor, o: Operators, called: str) -> Tensor:
    """The network with a call of each layer, in plain PyTorch.

    called: the changed module. If it is the MLP, the call is one of the MLP, and not of each of its layers.
    """
    block, matrices = model.blocks[0], o.gradient
    x = model.first(x)
    diffused = block.diffusion(x, o)
    rows, columns = matrices.pattern.row_indices, matrices.pattern.column_indices
    dense = torch.zeros(2, len(x), len(x)).index_put((torch.arange(2)[:, None], rows, columns), matrices.values)
    parts = [x, diffused, block.gradient_features(dense @ diffused)]
    if block.attention is not None:
        parts.append(block.attention(x, o.gradient.pattern))
    if called == "blocks.0.mlp":
        return model.last(block.mlp(parts, residual=x))
    y = torch.cat(parts, 1)
    for i, layer in enumerate(block.mlp.layers):
        y = layer(block.mlp.dropout(y.relu()) if i > 0 else y)
    return model.last(x + y)


def results(model: DiffusionNet, out: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The output, all gradients, and the state of the network after its call."""
    model.zero_grad()
    x.grad = None
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)]}
    assert all(grad is not None for grad in gradients.values())
    found = {
        "out": out,
        **{f"gradient of {name}": grad for name, grad in gradients.items()},
        **dict(model.named_buffers()),
    }
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the inputs of an MLP are in a list
@pytest.mark.parametrize(
    ("place", "change", "backend"), RUNS, ids=[f"{p.split('.')[-1]}-{c.__name__}-{b}" for p, c, b in RUNS]
)
def test_changed_layers_are_called(operators: Operators, place: str, change: Change, backend: str) -> None:
    """A training step agrees with plain PyTorch. So does a second one, for which some changes compute weights anew."""
    mode = "spectral" if backend == "triton" else "sparse"
    model = network(backend, dropout=0.0, gradient=mode, attention_heads=2 * place.endswith("attention"))
    calls: Calls = []
    other = change(model.get_submodule(place), calls)
    if other is not None:
        model.set_submodule(place, other)
    for _ in range(1 if change in ANYWHERE else 2):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        x = torch.randn(operators.num_vertices, 3, requires_grad=True)
        calls.clear()
        found = results(model, model(x, operators), x)
        if change not in UNCOUNTED:
            assert len(calls) == (2 if place.endswith("dropout") else 1)
        for buffer, before in buffers:
            buffer.copy_(before)
        use(model, "torch")
        expected = results(model, computed(model, x, operators, place), x)
        use(model, backend)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert relative(found[name], value) < 1e-4, name
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad


class OwnProduct(Tensor):
    """The weight of a layer that multiplies in its own way, as quantized weights do."""

    matrix: Tensor

    @staticmethod
    def __new__(cls: type[OwnProduct], matrix: Tensor) -> OwnProduct:
        return Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["matrix"], None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = arguments
            return nn.functional.linear(x, weight.matrix, bias)
        return super().__torch_function__(function, types, arguments, options)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(arguments[0].matrix)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("place", LINEAR)
def test_weights_of_another_type(operators: Operators, place: str, backend: str) -> None:
    model, x = network(backend, dropout=0.0), torch.randn(12, 3)
    expected = model(x, operators).detach()
    layer = model.get_submodule(place)
    layer.weight = nn.Parameter(OwnProduct(layer.weight.detach()), requires_grad=False)
    assert relative(model(x, operators), expected) < 1e-5


OPTIONS: list[dict[str, Any]] = [
    {"gradient": "spectral"}, {"diffusion": "implicit"}, {"attention_heads": 2}, {"mlp_norm": "layer"}
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dynamic_quantization(operators: Operators, options: dict[str, Any]) -> None:
    """Quantized layers have no `weight` that could be read."""
    model, x = network("auto", **options).eval(), torch.randn(12, 3)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert (quantized.in_channels, quantized.width, quantized.out_channels) == (3, C, 4)
    with torch.no_grad():
        error = relative(quantized(x, operators), model(x, operators))
    assert 1e-4 < error < 0.1
    quantized.load_state_dict(quantized.state_dict())
    with pytest.raises(ValueError, match=r"it lacks weights: .*; write torch.save\(model.state_dict\(\), path\)"):
        quantized.save("never-written.safetensors")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_layers_that_are_left_out(operators: Operators, backend: str) -> None:
    """Their numbers of channels are those that the network was built with. Their inputs can have any."""
    model, x = network(backend), torch.randn(12, C)
    expected = model.blocks[0].eval()(x, operators)
    model.first = model.last = nn.Identity()
    assert (model.in_channels, model.width, model.out_channels) == (3, C, 4)
    assert model.architecture["in_channels"] == 3
    assert torch.equal(model(x, operators), expected)
    refused(ValueError, r"x should have shape \(12, 8\), shape is \(12, 3\)", model, x[:, :3], operators)
    refused(ValueError, r"features should have shape \(12, C\), shape is \(11, 8\)", model, x[:11], operators)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_layers_without_a_bias_and_lazy_ones(operators: Operators, backend: str) -> None:
    model, x = network(backend, dropout=0.0), torch.randn(12, 3)
    model.first = nn.LazyLinear(C)
    model.last, model.blocks[0].mlp.get_submodule("2").bias = nn.Linear(C, 4, bias=False), None
    assert relative(model(x, operators), computed(model, x, operators, "").detach()) < 1e-5
    assert type(model.first) is nn.Linear
    refused(ValueError, r"features should have shape \(12, 3\), shape is \(12, 2\)", model, x[:, :2], operators)
    with pytest.raises(TypeError, match="does not support item assignment"):
        model.blocks[0].mlp.layers[1] = nn.Linear(C, C)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_dropout_between_layers_that_are_called(operators: Operators, backend: str) -> None:
    """It acts in training only, before each layer but the first."""
    model, x = network(backend, dropout=0.75), torch.randn(12, 3)
    zeros = []
    for layer in model.blocks[0].mlp.layers:
        layer.register_forward_pre_hook(lambda m, inputs: zeros.append(float((inputs[0] == 0).float().mean())))
    model(x, operators)
    model.eval()(x, operators)
    assert zeros[0] == zeros[3] == 0
    assert min(zeros[1:3]) > 0.75
    assert max(zeros[4:]) < 0.75
