"""Wrong arguments of modules. Each message says what was given and what to write instead."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from torch import Tensor, nn

from diffnet import (
    BlockSparseAttention,
    DiffusionNet,
    DiffusionNetBlock,
    ImplicitDiffusion,
    LearnedTimeDiffusion,
    MeshAttention,
    Operators,
    SpatialGradientFeatures,
    collate,
    hks,
    precompute,
    precompute_all,
)
from diffnet.mlp import MLP

MESH = trimesh.creation.icosphere(0)  # 12 vertices
network = partial(DiffusionNet, 3, 5, width=8, blocks=1)


def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
    """The call raises this kind of error, in one line that contains these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


COUNTS = {
    "in_channels": lambda n: DiffusionNet(n, 5),
    "out_channels": lambda n: DiffusionNet(3, n),
    "width": lambda n: DiffusionNet(3, 5, width=n),
    "blocks": lambda n: DiffusionNet(3, 5, blocks=n),
    "widths[1]": lambda n: DiffusionNet(3, 5, mlp_hidden=[n]),
    "channels (block)": lambda n: DiffusionNetBlock(n),
    "channels (diffusion)": lambda n: LearnedTimeDiffusion(n),
    "channels (implicit)": lambda n: ImplicitDiffusion(n),
    "channels (features)": lambda n: SpatialGradientFeatures(n),
    "channels (attention)": lambda n: MeshAttention(n),
    "heads": lambda n: MeshAttention(8, n),
    "channels (blocks)": lambda n: BlockSparseAttention(n),
    "length": lambda n: BlockSparseAttention(8, length=n),
    "max_iterations": lambda n: ImplicitDiffusion(8, max_iterations=n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    make, argument = COUNTS[name], name.split(" ")[0]
    for count in (0, -4):
        refused(lambda count=count: make(count), ValueError, f"{argument} should be at least 1, got {count}")  # type: ignore[misc]
    for value in (8.0, "8", True, None):
        if (argument, value) != ("length", None):
            words = f"{argument} should be an integer, got {value!r} of type {type(value).__name__}"
            refused(lambda value=value: make(value), TypeError, words)  # type: ignore[misc]
    make(np.int64(8))


DROPOUTS = {
    "network": lambda p: network(dropout=p),
    "block": lambda p: DiffusionNetBlock(8, dropout=p),
    "mlp": lambda p: MLP([3, 4, 5], p),
    "attention": lambda p: MeshAttention(8, dropout=p),
    "blocks": lambda p: BlockSparseAttention(8, dropout=p),
}


@pytest.mark.parametrize("module", DROPOUTS)
def test_dropout(module: str) -> None:
    """The original's `dropout=True` is a probability of 1 in PyTorch, which leaves no block a gradient."""
    make = DROPOUTS[module]
    refused(lambda: make(True), TypeError, "dropout should be the probability", "got True; write dropout=0.5")
    refused(lambda: make(False), TypeError, "got False; write dropout=0.0")
    refused(lambda: make("0.5"), TypeError, "dropout should be a number, got '0.5' of type str")
    refused(lambda: make(None), TypeError, "dropout should be a number, got None")
    for p in (1.0, 1, -0.1, 50, float("nan")):
        refused(lambda p=p: make(p), ValueError, f"dropout should be at least 0 and below 1, got {p}")  # type: ignore[misc]
    for p in (0, 0.0, 0.999, np.float32(0.5)):
        make(p)


def test_widths_and_activations() -> None:
    for widths in ([], [3]):
        refused(lambda widths=widths: MLP(widths), ValueError, f"the output at least, got {widths}")  # type: ignore[misc]
    refused(lambda: network(last_activation="softmax"), TypeError, "function of a tensor, got 'softmax'; write")


OF_BLOCK = {
    "mlp_hidden_dims": "mlp_hidden",
    "with_gradient_features": "gradient_features",
    "with_gradient_rotations": "gradient_rotation",
    "diffusion_method": 'diffusion="spectral" or diffusion="implicit"',
}
NAMES_OF_THE_ORIGINAL: dict[Callable[..., nn.Module], dict[str, str]] = {
    DiffusionNet: {"C_in": "in_channels", "C_out": "out_channels", "C_width": "width", "N_block": "blocks", **OF_BLOCK},
    DiffusionNetBlock: {"C_width": "channels", **OF_BLOCK},
    LearnedTimeDiffusion: {"C_inout": "channels", "method": "ImplicitDiffusion(channels)"},
    SpatialGradientFeatures: {"C_inout": "channels", "with_gradient_rotations": "rotation"},
    MLP: {"layer_sizes": "widths", "activation": "nothing: it is ReLU", "name": "nothing: layers have numbers"},
}


@pytest.mark.parametrize("module", NAMES_OF_THE_ORIGINAL)
def test_names_of_the_original(module: Callable[..., nn.Module]) -> None:
    for name, ours in NAMES_OF_THE_ORIGINAL[module].items():
        words = f"has no argument {name}, which is the original's name"
        refused(lambda name=name: module(**{name: 8}), TypeError, words, ours)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        module(8, 8, colour=1) if module is DiffusionNet else module(8, colour=1)


CALLS_OF_THE_ORIGINAL: list[tuple[Callable[..., object], dict[str, Any], str, str]] = [
    (precompute, {"verts": 0, "faces": 0}, "verts", "(verts, faces)"),
    (precompute, {"mesh": 0, "k_eig": 128}, "k_eig", "write k"),
    (precompute, {"mesh": 0, "op_cache_dir": "cache"}, "op_cache_dir", "write cache_dir"),
    (precompute, {"mesh": 0, "overwrite_cache": True}, "overwrite_cache", "delete the folder"),
    (precompute_all, {"verts_list": [], "faces_list": []}, "verts_list", "a list of (verts, faces)"),
    (precompute_all, {"meshes": [], "faces_list": []}, "faces_list", "a list of (verts, faces)"),
    (precompute_all, {"meshes": [], "k_eig": 128}, "k_eig", "write k"),
    (precompute_all, {"meshes": [], "op_cache_dir": "cache"}, "op_cache_dir", "write cache_dir"),
    (hks, {"evals": 0, "evecs": 0, "count": 16}, "evals", "write operators"),
    (hks, {"operators": 0, "evecs": 0}, "evecs", "write operators"),
]


@pytest.mark.parametrize(("function", "arguments", "name", "ours"), CALLS_OF_THE_ORIGINAL)
def test_calls_of_the_original(function: Callable[..., object], arguments: Any, name: str, ours: str) -> None:
    words = f"{function.__name__} has no argument {name}, which is the original's name; write"
    refused(lambda: function(**arguments), TypeError, words, ours)


def test_positions_of_the_original() -> None:
    """The original takes these arguments by position."""
    network_of: Any = DiffusionNet
    words = "DiffusionNet takes in_channels, out_channels by position, got 2 more; pass the others by name"
    refused(lambda: network_of(3, 8, 64, 2), TypeError, words)
    block_of: Any = DiffusionNetBlock
    refused(lambda: block_of(8, [8, 8]), TypeError, "takes channels by position, got 1 more")
    signature: Any = hks
    x = torch.zeros(3)
    refused(lambda: signature(x, x, 16), TypeError, "write hks(operators, 16) or hks(operators, scales=scales)")
    refused(lambda: signature(x, x), TypeError, "operators should be Operators, got Tensor")


@pytest.mark.parametrize("name", ["mass", "L", "evals", "evecs", "gradX", "gradY", "edges", "faces"])
def test_forward_of_the_original(name: str, operators: Operators) -> None:
    x = torch.zeros(12, 8)
    hint = "write model(features, operators) with operators = precompute((verts, faces))"
    model, block, diffusion = DiffusionNet(8, 5, width=8, blocks=1), DiffusionNetBlock(8), LearnedTimeDiffusion(8)
    for module in (model, block, diffusion):
        words = f"{type(module).__name__}.forward has no argument {name}, which is the original's name"
        refused(lambda m=module: m(x, **{name: x}), TypeError, words, hint)  # type: ignore[misc]
        refused(lambda m=module: m(x_in=x), TypeError, "has no argument x_in", "write features")  # type: ignore[misc]
        refused(lambda m=module: m(x, x, x, x, x), TypeError, "more", "by position, got", hint)  # type: ignore[misc]
    refused(lambda: model(x, operators.mass), TypeError, "operators should be Operators, got Tensor")
    refused(lambda: SpatialGradientFeatures(8)(vectors=x), TypeError, "gradients of shape (2, V, C)")


def test_signatures_remain() -> None:
    """Editors and `help` show the arguments, and modules can be copied."""
    assert list(inspect.signature(DiffusionNet).parameters)[:4] == ["in_channels", "out_channels", "width", "blocks"]
    assert inspect.signature(DiffusionNetBlock).parameters["dropout"].default == 0.5
    model = network()
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_features_and_operators(operators: Operators) -> None:
    model = network()
    x = torch.zeros(12, 3)
    words = "features should be a tensor, got"
    refused(lambda: model(x.tolist(), operators), TypeError, words, "list; convert it with torch.tensor")
    refused(lambda: model(x.numpy(), operators), TypeError, words, "ndarray; convert it with torch.from_numpy")
    refused(lambda: model(MESH, operators), TypeError, words, "Trimesh")
    for dtype in (torch.int64, torch.bool, torch.complex64):
        words = f"features should be floating point, got {dtype}; write features.float()"
        refused(lambda dtype=dtype: model(x.to(dtype), operators), TypeError, words)  # type: ignore[misc]
    for wrong in (x[0], x[:, 0], x[None], x[:, :2], x[1:]):
        words = f"features should have shape (12, 3), shape is {tuple(wrong.shape)}"
        refused(lambda wrong=wrong: model(wrong, operators), ValueError, words)  # type: ignore[misc]
    refused(lambda: model(x, MESH), TypeError, "operators should be Operators, got Trimesh; write precompute(mesh)")
    words = "operators should be Operators, got list; write collate(operators)"
    refused(lambda: model(x, [operators]), TypeError, words)
    refused(lambda: model(x.to("meta"), operators), ValueError, "features and the operators", "on meta and cpu")
    refused(lambda: model.to("meta")(x, operators), ValueError, "features and the network", "on cpu and meta")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_spectral_diffusion_needs_eigenpairs(backend: Any) -> None:
    """With k = 0 all that diffusion returns is 0. Implicit diffusion needs no eigenpairs."""
    none = precompute(MESH, k=0)
    x = torch.randn(12, 3)
    words = ("but the operators have k = 0", "precompute(mesh, k=128)", 'diffusion="implicit"')
    for options in ({}, {"gradient": "spectral"}, {"gradient": "sparse"}, {"gradient_features": False}):
        model = network(**options, backend=backend)  # type: ignore[arg-type]
        refused(lambda model=model: model(x, none), ValueError, *words)  # type: ignore[misc]
    refused(lambda: LearnedTimeDiffusion(3, backend)(x, none), ValueError, *words)
    assert network(diffusion="implicit", backend="torch")(x, none).isfinite().all()


@pytest.mark.parametrize("outputs_at", ["faces", "edges"])
def test_clouds_have_no_faces(outputs_at: Any, operators: Operators) -> None:
    cloud = precompute((MESH.vertices, None), k=6)
    model, x = network(outputs_at=outputs_at), torch.randn(12, 3)
    for points in (cloud, collate([cloud, cloud])):
        features = x.repeat(len(points), 1)
        words = (f'outputs_at="{outputs_at}" needs faces', "point clouds", 'write outputs_at="vertices"')
        refused(lambda f=features, o=points: model(f, o), ValueError, *words)  # type: ignore[misc]
    both = collate([operators, cloud])
    assert len(model(x.repeat(2, 1), both)) == len(model(x, operators)) > 0
    assert network()(x, cloud).shape == (12, 5)


@pytest.mark.parametrize("change", [lambda m: m[:, None], lambda m: m[None], lambda m: m[:1]])
def test_mass_of_another_shape(operators: Operators, change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=re.escape("shape is")):
        replace(operators, mass=change(operators.mass))


@pytest.mark.parametrize("diffusion", ["spectral", "implicit"])
def test_inputs_that_do_not_fit_a_block(diffusion: Any) -> None:
    """In a network of one's own, the block is the first to see them."""
    block, operators = DiffusionNetBlock(8, diffusion=diffusion), precompute(MESH, k=4)
    assert block(torch.zeros(12, 8), operators).shape == (12, 8)
    for shape in ((12, 4), (11, 8), (12,)):
        with pytest.raises(ValueError, match=re.escape(f"x should have shape (12, 8), shape is {shape}")):
            block(torch.zeros(shape), operators)
    with pytest.raises(TypeError, match=re.escape("operators should be Operators, got list; write collate(operators)")):
        block(torch.zeros(12, 8), [operators])
