"""The whole network."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.arguments import check_features, check_operators, refuses
from diffnet.block import DiffusionMode, DiffusionNetBlock, GradientMode
from diffnet.geometry import Operators
from diffnet.ops import Backend, mlp, segment_mean
from diffnet.ops.common.checks import check_count
from diffnet.ops.common.precision import compute_dtype
from diffnet.shared_launches import shared_dropout_seeds, shared_launches, shares_launches

OutputsAt: TypeAlias = Literal["vertices", "faces", "edges", "global_mean"]


def log_softmax(x: Tensor) -> Tensor:
    """Log-probabilities over the last dimension."""
    return F.log_softmax(x, dim=-1)


class DiffusionNet(nn.Module):
    """DiffusionNet on packed ragged batches (Sharp et al. 2022, https://arxiv.org/abs/2012.00888).

    Args:
        in_channels, out_channels: C_in and C_out.
        width: channels inside the network.
        blocks: number of `DiffusionNetBlock`s.
        outputs_at: "vertices"; "faces" or "edges", the means over corners or ends; or "global_mean", one output per
            mesh, weighted by vertex areas.
        last_activation: applied to the outputs, for example `log_softmax`. None by default.
        mlp_hidden, dropout, gradient_features, gradient_rotation, gradient, diffusion, attention_heads, backend: see
            `DiffusionNetBlock`.

    Raises ValueError for an unknown option, TypeError for the names that the original implementation gives arguments.

    >>> import torch, trimesh
    >>> from diffnet import DiffusionNet, precompute
    >>> mesh = trimesh.creation.icosphere(1)
    >>> operators = precompute(mesh, k=8)
    >>> model = DiffusionNet(3, 5, width=16, blocks=2, outputs_at="faces")
    >>> model(torch.from_numpy(mesh.vertices).float(), operators).shape
    torch.Size([80, 5])
    """

    @refuses(
        C_in="in_channels",
        C_out="out_channels",
        C_width="width",
        N_block="blocks",
        mlp_hidden_dims="mlp_hidden",
        with_gradient_features="gradient_features",
        with_gradient_rotations="gradient_rotation",
        diffusion_method='diffusion="spectral" or diffusion="implicit"',
    )
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
        for name, value in (
            ("in_channels", in_channels),
            ("out_channels", out_channels),
            ("width", width),
            ("blocks", blocks),
        ):
            check_count(name, value, 1)
        if last_activation is not None and not callable(last_activation):
            raise TypeError(
                f"last_activation should be a function of a tensor, got {last_activation!r}; "
                "write for example torch.sigmoid"
            )
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
        """features (V, C_in), packed like the operators → (V, C_out), (F, C_out), (E, C_out) or (B, C_out)

        Raises TypeError if the features are no floating-point tensor. Raises ValueError if they don't fit the operators
        or the network, for spectral diffusion without eigenpairs, and for outputs at faces or edges without faces.
        """
        check_operators(operators)
        check_features(features, operators, self.first)
        if self.outputs_at in ("faces", "edges") and operators.faces.shape[0] == 0:
            raise ValueError(
                f'outputs_at="{self.outputs_at}" needs faces, but the operators are of point clouds; '
                'write outputs_at="vertices" or outputs_at="global_mean"'
            )
        if not shares_launches(self.backend, features):
            return self._computed(features, operators)
        with shared_launches(self.first, self.blocks, self.last, features):
            return self._computed(features, operators)

    def _computed(self, features: Tensor, operators: Operators) -> Tensor:
        x = self._linear(self.first, features)
        # All blocks share these. On a GPU they are computed in the first step only.
        dtype = compute_dtype(x)
        on_basis = any(isinstance(block, DiffusionNetBlock) and block.on_basis(operators) for block in self.blocks)
        shared = operators.prepared(dtype) if on_basis else operators.with_basis_dtype(dtype)
        shares = shares_launches(self.backend, x)
        with shared_dropout_seeds(self.blocks, x.device) if shares else nullcontext():
            for block in self.blocks:
                x = block(x, shared)
        return self._outputs(self._linear(self.last, x), operators)

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return mlp([x], [layer.weight], [layer.bias], backend=self.backend)

    def _outputs(self, x: Tensor, operators: Operators) -> Tensor:
        """Average the values (V, C_out) at the vertices as `outputs_at` asks, and apply the last activation."""
        # The backward of `F.embedding` adds up in a fixed order. That of x[index] doesn't.
        if self.outputs_at == "faces":
            x = F.embedding(operators.faces, x).mean(1)
        elif self.outputs_at == "edges":
            x = F.embedding(operators.edges, x).mean(1)
        elif self.outputs_at == "global_mean":
            x = segment_mean(x, operators.mass, operators.ptr, operators.lengths, self.backend)
        return x if self.last_activation is None else self.last_activation(x)

    @classmethod
    def from_reference(
        cls,
        path: str | os.PathLike[str],
        outputs_at: OutputsAt = "vertices",
        last_activation: Callable[[Tensor], Tensor] | None = log_softmax,
    ) -> DiffusionNet:
        """Load a checkpoint of the original implementation, on the CPU and in eval mode.

        Width, blocks and channels are read off the weights. A checkpoint doesn't record the last activation. The
        published segmentation and classification networks end in a log-softmax, so this is the default. Pass None for
        networks that output plain features.

        Only tensors are read (`weights_only`). Raises ValueError if the file holds something else.
        """
        from diffnet.original_checkpoint import read_original_checkpoint

        state, arguments = read_original_checkpoint(path)
        model = cls(**arguments, outputs_at=outputs_at, last_activation=last_activation)
        model.load_state_dict(state)
        return model.eval()
