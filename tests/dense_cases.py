"""Valid calls of every dense operation, and arguments of wrong shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_accuracy import feature_inputs, normal
from torch import Tensor

from diffnet import ops

LENGTHS, V, K, C = (5, 0, 3), 8, 3, 4


@dataclass(frozen=True)
class Case:
    """An operation and its arguments; `run` calls it with them, changed or not."""

    operation: Callable[..., Any]
    arguments: dict[str, Any]
    backends: tuple[str, ...] = ("torch", "triton")

    def run(self, backend: str, **changed: Any) -> list[Tensor]:
        given = self.arguments | changed
        for name in ("inputs", "weights", "biases"):  # the lists of `mlp`, one name for each tensor
            if f"{name}[0]" in given:
                given[name] = [given.pop(key) for key in [*given] if key.startswith(f"{name}[")]
        out = self.operation(**given, **({"backend": backend} if len(self.backends) > 1 else {}))
        return [out] if isinstance(out, Tensor) else list(out)

    @property
    def floating(self) -> list[str]:
        return [n for n, x in self.arguments.items() if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def indices(self) -> list[str]:
        return [n for n, x in self.arguments.items() if isinstance(x, Tensor) and not x.is_floating_point()]


def cases(device: str = "cpu") -> dict[str, Case]:
    """Valid calls of every dense operation in float32."""

    def put(x: Tensor) -> Tensor:
        return x.to(device, torch.float32 if x.is_floating_point() else None)

    d, evecs, gradient_evecs, a_re, a_im, ptr = (put(x) for x in feature_inputs(LENGTHS, K, C))
    x, mass, evals, time = (put(t) for t in (normal(V, C), normal(V).abs(), normal(3, K).abs(), normal(C).abs()))
    matrices, extents = {"a_re": a_re, "a_im": a_im}, {"ptr": ptr, "lengths": None}
    layers = {
        "inputs[0]": x,
        "inputs[1]": put(normal(V, 5)),
        "weights[0]": put(normal(6, 9, scale=0.3)),
        "weights[1]": put(normal(7, 6, scale=0.3)),
        "biases[0]": put(normal(6)),
        "biases[1]": put(normal(7)),
        "residual": put(normal(V, 7)),
    }
    operators = {"mass": mass, "evals": evals, "evecs": evecs, "gradient_evecs": gradient_evecs}
    labels = put(torch.tensor([0, 3, -1, 2, 1, 0, 2, 3]))
    return {
        "to_spectral": Case(ops.to_spectral, {"x": x, "evecs": evecs, "mass": mass, **extents}),
        "from_spectral": Case(ops.from_spectral, {"coefficients": d, "evecs": evecs, **extents}),
        "diffuse": Case(ops.diffuse, {"spectrum": d, "evals": evals, "time": time}),
        "gradient_features": Case(ops.gradient_features, {"gradients": put(normal(2, V, C, scale=0.5)), **matrices}),
        "spectral_gradient_features": Case(
            ops.spectral_gradient_features,
            {"coefficients": d, "gradient_evecs": gradient_evecs, **matrices, **extents},
        ),
        "values_and_gradient_features": Case(
            ops.values_and_gradient_features,
            {"coefficients": d, "evecs": evecs, "gradient_evecs": gradient_evecs, **matrices, **extents},
        ),
        "diffusion_and_gradient_features": Case(
            ops.diffusion_and_gradient_features, {"x": x, **operators, "time": time, **matrices, **extents}
        ),
        "mlp": Case(ops.mlp, layers),
        "cross_entropy": Case(ops.cross_entropy, {"logits": x, "labels": labels}),
        "label_smoothing_loss": Case(ops.label_smoothing_loss, {"logits": x, "labels": labels}),
        "focal_loss": Case(ops.focal_loss, {"logits": x, "labels": labels}),
        "dice_loss": Case(ops.dice_loss, {"logits": x, "labels": labels}, ("torch",)),
        "generalized_dice_loss": Case(ops.generalized_dice_loss, {"logits": x, "labels": labels}, ("torch",)),
        "segment_mean": Case(ops.segment_mean, {"x": x, "weights": mass, **extents}),
    }


def wrong_shapes(x: Tensor) -> list[Tensor]:
    """One more, one fewer, and a single one in each dimension, one dimension more, one fewer, and none."""
    found = []
    for d, size in enumerate(x.shape):
        found += [torch.cat([x, x.narrow(d, 0, 1)], d), x.narrow(d, 0, size - 1), x.narrow(d, 0, 1)]
    return [*found, x[None], x[..., None], *([x[0]] if x.ndim > 1 else []), x.flatten()[0]]
