"""Learned inner products of gradients."""

from __future__ import annotations

from torch import Tensor, nn

from diffnet.ops import Backend, gradient_features, spectral_gradient_features


class SpatialGradientFeatures(nn.Module):
    """f = tanh(Re(ḡ ∘ A g)) of the tangent gradients g of C channels (Sharp et al. 2022, "Spatial Gradient Features").

    channels: C
    rotation: a complex matrix A, which can also turn gradients and so tell left from right of them; without it A is
        real, and features don't depend on the orientation of the surface
    backend: see LearnedTimeDiffusion
    """

    a_im: nn.Parameter | None

    def __init__(self, channels: int, rotation: bool = True, backend: Backend = "auto") -> None:
        super().__init__()
        self.backend: Backend = backend
        self.a_re = nn.Parameter(_linear_weight(channels))
        if rotation:
            self.a_im = nn.Parameter(_linear_weight(channels))
        else:
            self.register_parameter("a_im", None)

    def forward(self, gradients: Tensor) -> Tensor:
        """gradients (2, V, C), X and Y components → (V, C)"""
        return gradient_features(gradients, self.a_re, self.a_im, self.backend)

    def from_coefficients(
        self, coefficients: Tensor, gradient_evecs: Tensor, ptr: Tensor, lengths: tuple[int, ...] | None = None
    ) -> Tensor:
        """The same for the function with these coefficients (B, K, C), by gradient_evecs (2, V, K) → (V, C)"""
        return spectral_gradient_features(
            coefficients, gradient_evecs, self.a_re, self.a_im, ptr, lengths, self.backend
        )


def _linear_weight(channels: int) -> Tensor:
    """Initialised as nn.Linear does."""
    return nn.Linear(channels, channels, bias=False).weight.detach()
