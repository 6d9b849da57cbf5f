"""The whole network."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.block import DiffusionMode, DiffusionNetBlock, GradientMode
from diffnet.geometry import Operators
from diffnet.ops import Backend, mlp, segment_mean
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.precision import compute_dtype

OutputsAt: TypeAlias = Literal["vertices", "faces", "edges", "global_mean"]


def log_softmax(x: Tensor) -> Tensor:
    """Log-probabilities over the last dimension."""
    return F.log_softmax(x, dim=-1)


class DiffusionNet(nn.Module):
    """DiffusionNet (Sharp et al. 2022, https://arxiv.org/abs/2012.00888) on packed ragged batches.

    in_channels, out_channels: C_in, C_out
    width: channels inside the network
    blocks: how many `DiffusionNetBlock`s
    outputs_at: "vertices", "faces", "edges" (means over the corners or ends), or "global_mean" (one per mesh, weighted
        by vertex areas)
    last_activation: applied to the outputs, for example `log_softmax`; none by default
    mlp_hidden, dropout, gradient_features, gradient_rotation, gradient, diffusion, attention_heads, backend:
        see `DiffusionNetBlock`
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int = 128,
        blocks: int = 4,
        outputs_at: OutputsAt = "vertices",
        last_activation: Callable[[Tensor], Tensor] | None = None,
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
        if outputs_at not in get_args(OutputsAt):
            raise ValueError(f"outputs_at should be one of {', '.join(get_args(OutputsAt))}, got {outputs_at!r}")
        self.outputs_at = outputs_at
        self.last_activation = last_activation
        self.gradient = gradient
        self.backend: Backend = backend
        self.first = nn.Linear(in_channels, width)
        self.blocks = nn.ModuleList(
            DiffusionNetBlock(
                width,
                mlp_hidden=mlp_hidden,
                dropout=dropout,
                gradient_features=gradient_features,
                gradient_rotation=gradient_rotation,
                gradient=gradient,
                diffusion=diffusion,
                attention_heads=attention_heads,
                backend=backend,
            )
            for _ in range(blocks)
        )
        self.last = nn.Linear(width, out_channels)

    def forward(self, features: Tensor, operators: Operators) -> Tensor:
        """features (V, C_in), packed as the operators are → (V, C_out), (F, C_out), (E, C_out) or (B, C_out)

        Raises ValueError where the features don't fit the operators or the network.
        """
        expected = (operators.num_vertices, self.first.in_features)
        if features.shape != expected:
            raise ValueError(f"features should have shape {expected}, shape is {tuple(features.shape)}")
        # Where they are wanted but missing, once for all blocks.
        pushed = operators.with_gradient_evecs() if self.gradient == "spectral" else operators
        x = self._linear(self.first, features)
        if use_kernels(self.backend, x, matrix=True):
            pushed = pushed.with_basis_dtype(compute_dtype(x))
        for block in self.blocks:
            x = block(x, pushed)
        x = self._linear(self.last, x)
        if self.outputs_at == "faces":
            x = x[operators.faces].mean(1)
        elif self.outputs_at == "edges":
            x = x[operators.edges].mean(1)
        elif self.outputs_at == "global_mean":
            x = segment_mean(x, operators.mass, operators.ptr, operators.lengths)
        return x if self.last_activation is None else self.last_activation(x)

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if use_kernels(self.backend, x, matrix=True):
            return mlp([x], [layer.weight], [layer.bias], backend=self.backend)
        out: Tensor = layer(x)
        return out

    @classmethod
    def from_reference(
        cls,
        path: str | os.PathLike[str],
        outputs_at: OutputsAt = "vertices",
        last_activation: Callable[[Tensor], Tensor] | None = log_softmax,
    ) -> DiffusionNet:
        """Load a checkpoint of the original implementation, on the CPU and in eval mode.

        Width, blocks and channels are read off the weights. What a checkpoint doesn't record is the last activation:
        the published segmentation and classification networks end in a log-softmax, so that is the default; pass None
        for networks that put out plain features.

        Only tensors are read (`weights_only`). Raises ValueError where the file holds something else.
        """
        from diffnet.original_checkpoint import convert_reference

        state, shape = convert_reference(path)
        model = cls(**shape, outputs_at=outputs_at, last_activation=last_activation)
        model.load_state_dict(state)
        return model.eval()
