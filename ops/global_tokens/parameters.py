"""The parameters of tokens. Shapes are those of `ops.global_tokens.op`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Parameters(NamedTuple):
    """The parameters of the tokens of a block.

    share, share_bias: S (N, C) and s (N,)
    projection, projection_bias: (3C, C) and (3C,), of Q, K and V one after the other
    out: A (C, C)
    """

    share: Tensor
    share_bias: Tensor
    projection: Tensor
    projection_bias: Tensor
    out: Tensor


def tokens_in(parameters: Parameters | None) -> int:
    return 0 if parameters is None else parameters.share.shape[0]
