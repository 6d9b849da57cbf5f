"""One block of DiffusionNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from diffnet.arguments import check_eigenpairs, in_features_dtype, is_plain, refuses_fields
from diffnet.diffusion import LearnedTimeDiffusion, current_time
from diffnet.geometry import Operators
from diffnet.geometry.batches.functional import check_operators
from diffnet.geometry.errors import refuses
from diffnet.global_tokens import GlobalTokens
from diffnet.implicit_diffusion import ImplicitDiffusion
from diffnet.mesh_attention import MeshAttention
from diffnet.mlp import MLP
from diffnet.modulation import modulated_after_tokens
from diffnet.ops import Backend, Pattern, spmm
from diffnet.ops.common.checks import check_tensor
from diffnet.ops.common.precision import compute_dtype, without_autocast
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features.op import check_arguments, diffused_with_features, diffusion_block
from diffnet.ops.mlp.op import NOTHING, Shared, mlp_with
from diffnet.options import BlockArchitecture, Checked, MLPNorm, option, takes
from diffnet.spatial_gradient_features import Rotation, SpatialGradientFeatures, check_rotation

GradientMode: TypeAlias = Literal["auto", "spectral", "sparse"]

_MLP_NORMS: dict[MLPNorm, Callable[[int], nn.Module | None]] = {
    "none": lambda channels: None,
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
}

# The names that the original implementation gives arguments of blocks and networks.
ORIGINAL_NAMES = {
    "mlp_hidden_dims": "mlp_hidden",
    "with_gradient_features": "gradient_features",
    "with_gradient_rotations": "gradient_rotation",
    "diffusion_method": 'diffusion="spectral" or diffusion="implicit"',
}


@dataclass(frozen=True, kw_only=True)
class BlockDetails(Checked):
    """The options of a block that only code can choose."""

    mlp_hidden: Sequence[int] | None = option(
        None, "Widths of the hidden layers of the MLPs, (width, width) by default."
    )
    gradient_features: bool = option(
        True, "Whether to compute gradient features. Without them the network only diffuses."
    )
    gradient_rotation: Rotation = option(True, "See `rotation` of `SpatialGradientFeatures`.")
    gradient: GradientMode = option(
        "auto",
        "How gradients are computed, with the same result. spectral differentiates the basis; sparse applies the "
        "gradient operators to the diffused features. auto is spectral on a GPU, and if the operators hold "
        "`gradient_evecs`, else sparse.",
    )
    backend: Backend = option("auto", "torch for plain PyTorch, triton for the kernels, auto for the kernels on a GPU.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotation("gradient_rotation", self.gradient_rotation)
        if self.gradient_rotation != "swapped":
            object.__setattr__(self, "gradient_rotation", bool(self.gradient_rotation))  # NumPy has another bool


@dataclass(frozen=True)
class BlockOptions(BlockDetails, BlockArchitecture):
    """The arguments of `DiffusionNetBlock`."""

    channels: int = option(MISSING, "C, the channels of the input and the output.", least=1)


class BlockStages(NamedTuple):
    """What a block computes from its input, each (V, C). There may be no gradient features."""

    diffused: Tensor
    gradient_features: Tensor | None
    output: Tensor


class DiffusionNetBlock(nn.Module):
    """Learned diffusion, spatial gradient features and an MLP, added to the input.

    The MLP takes [x, diffused x, gradient features] and, with attention, the result of attention.

    Source: Sharp et al. 2022, "DiffusionNet Architecture".

    Its arguments are the fields of `BlockOptions`. "spectral" diffusion is a `LearnedTimeDiffusion`. "implicit"
    diffusion is an `ImplicitDiffusion`, which needs no eigenbasis; its gradients are sparse. `mlp_norm` is over the
    channels of each vertex, "layer" for `nn.LayerNorm` and "rms" for `nn.RMSNorm`. Attention is a `MeshAttention` over
    the operators' neighborhood. Dropout is before every layer of the MLP but the first. With tokens, the input x goes
    through a `GlobalTokens`, which changes nothing in a new block.

    If `diffusion` or `gradient_features` is replaced by another module, has hooks or is changed in another way, it is
    called, with sparse gradients.

    Raises ValueError for an unknown option, TypeError for the names that the original implementation gives arguments.
    """

    @refuses(C_width="channels", **ORIGINAL_NAMES)
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
        self.tokens = GlobalTokens(channels, o.global_tokens, o.backend) if o.global_tokens else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle, which may be of a version without tokens."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "tokens" not in self._modules:
            vars(self).setdefault("tokens", None)

    @refuses_fields
    def forward(
        self, x: Tensor, operators: Operators, modulation: Tensor | None = None, *, shared: Shared = NOTHING
    ) -> Tensor:
        """x (V, C) → (V, C)

        modulation: (B, 2C), [γ, β] of each mesh, by which (1 + γ) ∘ x + β replaces x after the tokens, see `Modulation`
        shared: what the network has computed for all blocks

        Raises ValueError for another shape, TypeError for operators of another type.
        """
        check_operators(operators)
        check_tensor("x", x, (operators.num_vertices, self.channels))
        if modulation is not None:
            check_tensor("modulation", modulation, (len(operators), 2 * self.channels), operators.device)
        x = modulated_after_tokens(x, operators, self.tokens, modulation, self.backend)
        return in_features_dtype(self._outputs(x, operators, shared), x)

    def stages(self, x: Tensor, operators: Operators, modulation: Tensor | None = None) -> BlockStages:
        """What the block computes on the way to its output, to look at or to draw. See `forward`.

        >>> import torch
        >>> from diffnet.geometry import precompute
        >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
        >>> DiffusionNetBlock(4).stages(torch.ones(3, 4), triangle).diffused.shape
        torch.Size([3, 4])
        """
        output = self(x, operators, modulation)
        x = modulated_after_tokens(x, operators, self.tokens, modulation, self.backend)
        return BlockStages(*self._diffused_with_features(x, operators), output)

    def _diffused_with_features(self, x: Tensor, operators: Operators) -> tuple[Tensor, Tensor | None]:
        """Call the modules, with sparse gradients."""
        diffused: Tensor = self.diffusion(x, operators)
        if self.gradient_features is None:
            return diffused, None
        matrix = operators.gradient
        with without_autocast(x):
            gradients = spmm(matrix.pattern, matrix.values, diffused, backend=self.backend)
        return diffused, self.gradient_features(gradients)

    def _outputs(self, x: Tensor, operators: Operators, shared: Shared) -> Tensor:
        """x (V, C) → (V, C), perhaps in the dtype of the operators"""
        mlp = self.mlp
        arguments = self._arguments(x, operators, shared) if self._is_spectral() else None
        layers = mlp.plain_parameters() if is_plain(mlp, MLP) else None
        extended = self.attention is not None or self.mlp_norm is not None
        if arguments is not None and layers is not None and not extended and mlp.backend == self.backend:
            return diffusion_block(x, arguments, *layers, mlp.current_dropout(), self.backend, shared)
        if arguments is None:
            diffused, features = self._diffused_with_features(x, operators)
            inputs = [x, diffused] if features is None else [x, diffused, features]
        else:
            x, *parts = diffused_with_features(x, check_arguments(x, arguments), self.backend)
            inputs = [x, *parts]
        if self.attention is not None:
            inputs.append(self.attention(x, operators.neighborhood or operators.gradient.pattern))
        if self.mlp_norm is not None:
            joined = torch.cat(inputs, 1)
            scales = next(self.mlp_norm.parameters(), joined)
            inputs = [self.mlp_norm(joined.to(scales.dtype)).to(x.dtype)]  # under autocast, joined may be bfloat16
        if layers is not None:
            return mlp_with(inputs, *layers, mlp.current_dropout(), x, mlp.backend, shared)
        return mlp(inputs, residual=x)

    def _arguments(self, x: Tensor, operators: Operators, shared: Shared) -> BlockArguments:
        """The operators, and the parameters of plain modules."""
        check_eigenpairs(operators)
        o, diffusion, features = operators, self.diffusion, self.gradient_features
        assert isinstance(diffusion, LearnedTimeDiffusion)
        assert features is not None
        time = diffusion.time if shared.clamped else current_time(diffusion)
        a_re, a_im, swapped = features.a_re, features.a_im, features.swapped
        pattern: Pattern | None
        if self._takes_basis(o):
            o = o.prepared(compute_dtype(x, o.evecs))
            assert o.gradient_evecs is not None
            gradient, pattern = o.gradient_evecs, None
        else:
            gradient, pattern = o.gradient.values, o.gradient.pattern
        return BlockArguments(o.mass, o.evals, o.evecs, gradient, time, a_re, a_im, o.ptr, pattern, o.lengths, swapped)

    def draws_numbers(self) -> bool:
        """Whether a call may draw random numbers."""
        return type(self.mlp) is not MLP or self.mlp.current_dropout() > 0

    def on_basis(self, operators: Operators) -> bool:
        """Whether the block takes gradients on the basis, so that it uses `operators.prepared`.

        Modules that have to be called get functions at the vertices, whose gradients are sparse.
        """
        return self._is_spectral() and self._takes_basis(operators)

    def _is_spectral(self) -> bool:
        plain = is_plain(self.diffusion, LearnedTimeDiffusion)
        return plain and is_plain(self.gradient_features, SpatialGradientFeatures)

    def _takes_basis(self, operators: Operators) -> bool:
        """On the CPU, sparse products are cheaper than the gradient of the basis, unless the operators hold it."""
        if self.gradient == "auto":
            return operators.device.type == "cuda" or operators.gradient_evecs is not None
        return self.gradient == "spectral"
