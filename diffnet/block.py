"""One block of DiffusionNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from diffnet.arguments import check_eigenpairs, check_operators, is_plain, refuses_fields
from diffnet.diffusion import LearnedTimeDiffusion
from diffnet.geometry import Operators
from diffnet.geometry.argument_names import refuses
from diffnet.implicit_diffusion import ImplicitDiffusion
from diffnet.mesh_attention import MeshAttention
from diffnet.mlp import MLP
from diffnet.ops import Backend, diffusion_and_gradient_features, spmm
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.diffusion_features.block import BlockArguments, diffusion_block, is_one_node
from diffnet.ops.diffusion_features.sparse import sparse_diffusion_and_gradient_features
from diffnet.ops.mlp.op import mlp_with
from diffnet.options import BlockArchitecture, Checked, MLPNorm, about, takes
from diffnet.spatial_gradient_features import Rotation, SpatialGradientFeatures, check_rotation

if TYPE_CHECKING:
    from diffnet.ops.common.matmul import Converted  # imports Triton

GradientMode: TypeAlias = Literal["auto", "spectral", "sparse"]

_MLP_NORMS: dict[MLPNorm, Callable[[int], nn.Module | None]] = {
    "none": lambda channels: None,
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
}


class Shared(NamedTuple):
    """What a network has computed for one of its modules. The module computes what is missing itself.

    converted: the weights of its layers
    seeds: of dropout in the hidden layers of the MLP (n − 1, 2)
    clamped: whether negative times have been set to 0
    """

    converted: Converted | None = None
    seeds: Tensor | None = None
    clamped: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockDetails(Checked):
    """The options of a block that only code can choose."""

    mlp_hidden: Sequence[int] | None = field(
        default=None, metadata=about("Widths of the hidden layers of the MLPs, (width, width) by default.")
    )
    gradient_features: bool = field(
        default=True, metadata=about("Whether to compute gradient features. Without them the network only diffuses.")
    )
    gradient_rotation: Rotation = field(default=True, metadata=about("See `rotation` of `SpatialGradientFeatures`."))
    gradient: GradientMode = field(
        default="auto",
        metadata=about(
            "How gradients are computed, with the same result. spectral differentiates the basis; sparse applies the "
            "gradient operators to the diffused features. auto is spectral on a GPU, and if the operators hold "
            "`gradient_evecs`, else sparse."
        ),
    )
    backend: Backend = field(
        default="auto",
        metadata=about("torch for plain PyTorch, triton for the kernels, auto for the kernels on a GPU."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotation("gradient_rotation", self.gradient_rotation)
        if self.gradient_rotation != "swapped":
            object.__setattr__(self, "gradient_rotation", bool(self.gradient_rotation))  # NumPy has another bool


@dataclass(frozen=True)
class BlockOptions(BlockDetails, BlockArchitecture):
    """The arguments of `DiffusionNetBlock`."""

    channels: int = field(metadata=about("C, the channels of the input and the output.", least=1))


class DiffusionNetBlock(nn.Module):
    """Learned diffusion, spatial gradient features and an MLP, added to the input.

    The MLP takes [x, diffused x, gradient features] and, with attention, the result of attention.

    Source: Sharp et al. 2022, "DiffusionNet Architecture".

    Its arguments are the fields of `BlockOptions`. "spectral" diffusion is a `LearnedTimeDiffusion`. "implicit"
    diffusion is an `ImplicitDiffusion`, which needs no eigenbasis; its gradients are sparse. `mlp_norm` is over the
    channels of each vertex, "layer" for `nn.LayerNorm` and "rms" for `nn.RMSNorm`. Attention is a `MeshAttention` over
    the operators' neighborhood. Dropout is before every layer of the MLP but the first.

    If `diffusion` or `gradient_features` is replaced by another module, has hooks or is changed in another way, it is
    called, with sparse gradients.

    Raises ValueError for an unknown option, TypeError for the names that the original implementation gives arguments.
    """

    @refuses(
        C_width="channels",
        mlp_hidden_dims="mlp_hidden",
        with_gradient_features="gradient_features",
        with_gradient_rotations="gradient_rotation",
        diffusion_method='diffusion="spectral" or diffusion="implicit"',
    )
    @takes(BlockOptions)
    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        o, channels = options, options.channels
        if o.diffusion == "implicit" and o.gradient == "spectral":
            raise ValueError("gradient can't be 'spectral' if diffusion is 'implicit': there are no coefficients")
        self.channels = channels
        self.gradient = o.gradient
        self.backend: Backend = o.backend
        self.diffusion: LearnedTimeDiffusion | ImplicitDiffusion
        self.diffusion = (
            LearnedTimeDiffusion(channels, o.backend, o.initial_times)
            if o.diffusion == "spectral"
            else ImplicitDiffusion(channels, backend=o.backend, initial_times=o.initial_times)
        )
        self.gradient_features = (
            SpatialGradientFeatures(channels, o.gradient_rotation, o.backend) if o.gradient_features else None
        )
        heads = o.attention_heads
        self.attention = MeshAttention(channels, heads, backend=o.backend) if heads != 0 else None
        inputs = (2 + o.gradient_features + (self.attention is not None)) * channels
        hidden = (channels, channels) if o.mlp_hidden is None else o.mlp_hidden
        self.mlp_norm = _MLP_NORMS[o.mlp_norm](inputs)
        self.mlp = MLP([inputs, *hidden, channels], o.dropout, o.backend)

    @refuses_fields
    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, C)

        Raises ValueError for another shape of x, TypeError for operators of another type.
        """
        return self.run(x, operators, Shared())

    def run(self, x: Tensor, operators: Operators, shared: Shared) -> Tensor:
        """Compute `forward` with what a network has computed for the block. A block with hooks has to be called."""
        check_operators(operators)
        if x.shape != (operators.num_vertices, self.channels):
            expected = operators.num_vertices, self.channels
            raise ValueError(f"x should have shape {expected}, shape is {tuple(x.shape)}")
        mlp = self.mlp
        parameters = mlp.plain_parameters() if is_plain(mlp, MLP) else None
        if self.on_basis(operators):
            o = operators.prepared(compute_dtype(x, operators.evecs))
            arguments, swapped = self._arguments(o, shared), self._swapped()
            between = self.attention is not None or self.mlp_norm is not None
            if parameters is not None and not between and mlp.backend == self.backend:
                (weights, biases), dropout = parameters, mlp.current_dropout()
                if is_one_node(self.backend, x, arguments, weights):
                    return diffusion_block(
                        x, arguments, o.lengths, weights, biases, dropout, shared.seeds, swapped, shared.converted
                    )
            # The rest of the block uses the returned x; its gradients are then summed in one kernel.
            x, *parts = diffusion_and_gradient_features(x, *arguments, o.lengths, self.backend, swapped=swapped)
        else:
            x, *parts = self._diffused_and_features(x, operators, shared)
        if self.attention is not None:
            parts.append(self.attention(x, operators.neighborhood or operators.gradient.pattern))
        inputs = [x, *parts]
        if self.mlp_norm is not None:
            joined = torch.cat(inputs, 1)
            scales = next(self.mlp_norm.parameters(), joined)
            inputs = [self.mlp_norm(joined.to(scales.dtype)).to(x.dtype)]  # under autocast, joined may be bfloat16
        if parameters is not None:
            return mlp_with(inputs, *parameters, mlp.current_dropout(), x, mlp.backend, shared.converted, shared.seeds)
        out: Tensor = mlp(inputs, residual=x)
        return out

    def _arguments(self, operators: Operators, shared: Shared) -> BlockArguments:
        """Return the arguments of `diffusion_and_gradient_features` for operators with `gradient_evecs`."""
        check_eigenpairs(operators)
        diffusion, features, gradient_evecs = self.diffusion, self.gradient_features, operators.gradient_evecs
        assert isinstance(diffusion, LearnedTimeDiffusion)
        assert features is not None
        assert gradient_evecs is not None
        o, time = operators, diffusion.learned_time(clamped=shared.clamped)
        return BlockArguments(o.mass, o.evals, o.evecs, gradient_evecs, time, features.a_re, features.a_im, o.ptr)

    def _swapped(self) -> bool:
        features = self.gradient_features  # reading a submodule takes 1 µs
        return features is not None and features.swapped

    def _diffused_and_features(self, x: Tensor, operators: Operators, shared: Shared) -> tuple[Tensor, ...]:
        """Return x, the diffused x and, if the block has them, gradient features from sparse gradients, (V, C) each.

        The rest of the block uses the returned x; its gradients are then summed in one kernel.
        """
        o, gradient = operators, operators.gradient
        diffusion, features = self.diffusion, self.gradient_features
        if is_plain(diffusion, LearnedTimeDiffusion) and is_plain(features, SpatialGradientFeatures):
            check_eigenpairs(o)
            return sparse_diffusion_and_gradient_features(
                x,
                o.mass,
                o.evals,
                o.evecs,
                gradient.pattern,
                gradient.values,
                diffusion.learned_time(clamped=shared.clamped),
                features.a_re,
                features.a_im,
                o.ptr,
                o.lengths,
                self.backend,
                swapped=features.swapped,
            )
        if is_plain(diffusion, LearnedTimeDiffusion):
            diffused = diffusion.diffused(x, o, clamped=shared.clamped)
        else:
            diffused = diffusion(x, o)
        if features is None:
            return x, diffused
        return x, diffused, features(spmm(gradient.pattern, gradient.values, diffused, backend=self.backend))

    def on_basis(self, operators: Operators) -> bool:
        """Whether the block takes gradients on the basis, so that it uses `operators.prepared`.

        On the CPU, sparse products are cheaper than the gradient of the basis, unless the operators hold it. Modules
        that have to be called get functions at the vertices, whose gradients are sparse.
        """
        if self.gradient == "auto":
            wanted = operators.device.type == "cuda" or operators.gradient_evecs is not None
        else:
            wanted = self.gradient == "spectral"
        plain = wanted and is_plain(self.diffusion, LearnedTimeDiffusion)
        return plain and is_plain(self.gradient_features, SpatialGradientFeatures)
