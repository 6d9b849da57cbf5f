"""Learned inner products of gradients."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from diffnet.geometry.errors import refuses
from diffnet.ops import Backend, gradient_features
from diffnet.ops.common.checks import check_count

Rotation: TypeAlias = bool | Literal["swapped"]


class SpatialGradientFeatures(nn.Module):
    """Gradient features f = tanh(Re(ḡ ∘ A g)) of the tangent gradients g of C channels.

    Source: Sharp et al. 2022, "Spatial Gradient Features".

    Args:
        channels: C.
        rotation: whether A is complex. A complex A also rotates gradients, so features distinguish left from right. A
            real A gives features that don't depend on the orientation of the surface. "swapped" is the form of
            published networks of unsupervised shape matching, see `swapped` of `ops.gradient_features`. It depends on
            the arbitrary directions of the tangent frames, so use it for such weights only.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    The parameters `a_re` and `a_im` (None without rotation) are (C, C), initialized like the weight of `nn.Linear`.
    """

    a_im: nn.Parameter | None

    @refuses(C_inout="channels", with_gradient_rotations="rotation")
    def __init__(self, channels: int, rotation: Rotation = True, backend: Backend = "auto") -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_rotation("rotation", rotation)
        self.swapped = rotation == "swapped"
        self.backend: Backend = backend
        self.a_re = nn.Parameter(_linear_weight(channels))
        if rotation:
            self.a_im = nn.Parameter(_linear_weight(channels))
        else:
            self.register_parameter("a_im", None)

    @refuses(vectors="gradients of shape (2, V, C); the original has (V, C, 2)")
    def forward(self, gradients: Tensor) -> Tensor:
        """gradients (2, V, C), the X and Y components → (V, C)"""
        return gradient_features(gradients, self.a_re, self.a_im, self.backend, swapped=self.swapped)

    def extra_repr(self) -> str:
        rotation = "swapped" if self.swapped else self.a_im is not None
        return f"{len(self.a_re)}, rotation={rotation}"


def check_rotation(name: str, value: Any) -> None:
    """Raise ValueError unless a value is one of those that `SpatialGradientFeatures` takes as `rotation`."""
    if isinstance(value, str) and value != "swapped":
        raise ValueError(f'{name} should be True, False or "swapped", got {value!r}')


def _linear_weight(channels: int) -> Tensor:
    return nn.Linear(channels, channels, bias=False).weight.detach()
