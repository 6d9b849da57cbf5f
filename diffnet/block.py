"""One block of DiffusionNet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from diffnet.diffusion import LearnedTimeDiffusion
from diffnet.geometry import Operators
from diffnet.gradient_features import SpatialGradientFeatures
from diffnet.implicit_diffusion import ImplicitDiffusion
from diffnet.mesh_attention import MeshAttention
from diffnet.ops import Backend, diffusion_and_gradient_features, mlp, spmm
from diffnet.ops.common.backend import use_kernels

GradientMode: TypeAlias = Literal["auto", "spectral", "sparse"]
DiffusionMode: TypeAlias = Literal["spectral", "implicit"]


class DiffusionNetBlock(nn.Module):
    """Diffusion, gradient features, and an MLP on [x, diffused x, features], added to x; attention too where wanted.

    Source: Sharp et al. 2022, "DiffusionNet Architecture".

    channels: C
    mlp_hidden: widths of the MLP's hidden layers, by default (C, C)
    dropout: probability, before every layer of the MLP but the first
    gradient_features: leave them out for a network that only diffuses
    gradient_rotation: see SpatialGradientFeatures
    gradient: how gradients are taken. "spectral" takes them on the basis, (GΦ) D; "sparse" applies the sparse operators
        to the diffused features; both give the same. "auto" is spectral where the operators hold `gradient_evecs`.
    diffusion: "spectral", in the eigenbasis (LearnedTimeDiffusion), or "implicit", which needs none
        (ImplicitDiffusion); gradients of implicitly diffused features are sparse
    attention_heads: of a MeshAttention over the operators' neighbourhood, whose result is one more input of the MLP;
        by default there is none
    backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for kernels on a GPU (see `ops.backend`)
    """

    def __init__(
        self,
        channels: int,
        *,
        mlp_hidden: Sequence[int] | None = None,
        dropout: float = 0.5,
        gradient_features: bool = True,
        gradient_rotation: bool = True,
        gradient: GradientMode = "auto",
        diffusion: DiffusionMode = "spectral",
        attention_heads: int = 0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if gradient not in ("auto", "spectral", "sparse"):
            raise ValueError(f"gradient should be auto, spectral or sparse, got {gradient!r}")
        if diffusion not in get_args(DiffusionMode):
            raise ValueError(f"diffusion should be one of {', '.join(get_args(DiffusionMode))}, got {diffusion!r}")
        if diffusion == "implicit" and gradient == "spectral":
            raise ValueError("gradient can't be 'spectral' where diffusion is 'implicit': there are no coefficients")
        self.gradient = gradient
        self.backend: Backend = backend
        self.diffusion: LearnedTimeDiffusion | ImplicitDiffusion
        self.diffusion = (
            LearnedTimeDiffusion(channels, backend)
            if diffusion == "spectral"
            else ImplicitDiffusion(channels, backend=backend)
        )
        self.gradient_features = (
            SpatialGradientFeatures(channels, gradient_rotation, backend) if gradient_features else None
        )
        self.attention = MeshAttention(channels, attention_heads, backend=backend) if attention_heads != 0 else None
        inputs = (2 + gradient_features + (self.attention is not None)) * channels
        hidden = (channels, channels) if mlp_hidden is None else mlp_hidden
        self.mlp = mlp_layers([inputs, *hidden, channels], dropout)

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)"""
        x, *parts = self._diffused_and_features(x, operators)
        if self.attention is not None:
            parts.append(self.attention(x, operators.neighborhood or operators.gradient.pattern))
        return run_mlp(self.mlp, [x, *parts], x, self.backend)

    def _diffused_and_features(self, x: Tensor, operators: Operators) -> tuple[Tensor, ...]:
        """x, which the rest of the block takes from here, and what of these there is"""
        o, features = operators, self.gradient_features
        if isinstance(self.diffusion, ImplicitDiffusion):
            diffused = self.diffusion(x, o)
        elif features is not None and (
            self.gradient == "spectral" or (self.gradient == "auto" and o.gradient_evecs is not None)
        ):
            pushed = o.with_gradient_evecs().gradient_evecs
            assert pushed is not None
            time, a_re, a_im = self.diffusion.learned_time(), features.a_re, features.a_im
            return diffusion_and_gradient_features(
                x, o.mass, o.evals, o.evecs, pushed, time, a_re, a_im, o.ptr, o.lengths, self.backend
            )
        else:
            diffused = self.diffusion(x, o)
        if features is None:
            return x, diffused
        gradients = spmm(o.gradient.pattern, o.gradient.values, diffused, backend=self.backend)
        return x, diffused, features(gradients)


def mlp_layers(widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Linear layers of these widths with ReLU between, and dropout before every layer but the first."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        if i > 0:
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def run_mlp(layers: nn.Sequential, inputs: Sequence[Tensor], residual: Tensor, backend: Backend) -> Tensor:
    """residual + layers([x₁ … xₙ]): by the kernels, unless the layers are others than `mlp_layers` makes."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    dropouts = [layer.p if layer.training else 0.0 for layer in layers if isinstance(layer, nn.Dropout)]
    between = [type(layer) for layer in layers if type(layer) not in (nn.Linear, nn.Dropout)]
    known = between == [nn.ReLU] * (len(linear) - 1) and all(p == dropouts[0] for p in dropouts)
    if known and use_kernels(backend, residual, matrix=True):
        weights, biases = [layer.weight for layer in linear], [layer.bias for layer in linear]
        dropout = dropouts[0] if dropouts else 0.0
        return mlp(inputs, weights, biases, dropout=dropout, residual=residual, backend=backend)
    out: Tensor = residual + layers(torch.cat(list(inputs), dim=-1))
    return out
