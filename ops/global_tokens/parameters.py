"""The parameters of tokens and of the modulation by conditions. Shapes are those of `ops.global_tokens.op`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Parameters(NamedTuple):
    """The parameters of both layers. Those of a missing layer are None.

    share, share_bias: S (N, C) and s (N,)
    projection, projection_bias: (3C, C) and (3C,), of Q, K and V one after the other
    out: A (C, C)
    modulation, modulation_bias: W (2C, P) and b (2C,)
    """

    share: Tensor | None = None
    share_bias: Tensor | None = None
    projection: Tensor | None = None
    projection_bias: Tensor | None = None
    out: Tensor | None = None
    modulation: Tensor | None = None
    modulation_bias: Tensor | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.share is None else self.share.shape[0]
