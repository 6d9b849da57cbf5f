"""Vectors in space from features at vertices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffnet.arguments import as_weights
from diffnet.geometry import Operators, gradient
from diffnet.ops import Backend
from diffnet.ops.common.checks import check_count, check_tensor


class TangentVectors(nn.Module):
    """Vectors at the vertices, from the gradients of C features: u_p = Σ_c a_pc ∇x_c + s_p n with a = W x + b.

    The gradients are tangent to the surface, and n is its normal. s = w x + d is there with `normal=True`, else s = 0.

    The vectors turn and mirror with a mesh, if its features stay as they are, and they don't depend on the directions
    of the tangent frames. Such features are those of a `DiffusionNet(…, gradient_rotation=False)` on heat kernel
    signatures. With `gradient_rotation=True`, vectors turn with the mesh, but they need not mirror.

    Gradients are per length: on a mesh of twice the size, the tangent part is half as long.

    Args:
        channels: C.
        vectors: P, the number of vectors at each vertex.
        normal: whether vectors have a normal component.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    >>> from diffnet import DiffusionNet, precompute
    >>> operators = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> features = DiffusionNet(3, 16, width=16, blocks=1)(torch.eye(3), operators)
    >>> TangentVectors(16)(features, operators).shape
    torch.Size([3, 1, 3])
    """

    def __init__(self, channels: int, vectors: int = 1, *, normal: bool = False, backend: Backend = "auto") -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("vectors", vectors, 1)
        self.channels, self.vectors = channels, vectors
        self.backend: Backend = backend
        self.coefficients = nn.Linear(channels, vectors * channels)
        self.along_normal = nn.Linear(channels, vectors) if normal else None

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        """x (V, C) → (V, P, 3)

        Raises ValueError for another shape of x, TypeError for operators of another type.
        """
        gradients = gradient(x, operators, backend=self.backend)
        check_tensor("x", x, (operators.num_vertices, self.channels), operators.device)
        x = as_weights(x, self.coefficients)
        coefficients = self.coefficients(x).unflatten(1, (self.vectors, self.channels))
        tangent = torch.einsum("vpc,dvc->vpd", coefficients, gradients.to(coefficients.dtype))
        frames = operators.frames.to(tangent.dtype)
        vectors = tangent @ frames[:, :2]
        if self.along_normal is None:
            return vectors
        return vectors + self.along_normal(x)[:, :, None] * frames[:, 2:]
