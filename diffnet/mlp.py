"""The multilayer perceptron of a block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from diffnet.arguments import is_plain
from diffnet.geometry.errors import refuses
from diffnet.ops import Backend, mlp
from diffnet.ops.common.checks import check_count, check_dropout


class MLP(nn.Module):
    """Linear layers with ReLU between them, and dropout before every layer but the first.

    The kernels run all layers at once. If a layer or `self.dropout` has hooks, is of another type or is changed in
    another way, all of them are called one by one instead. To use another network in a block, assign a module with the
    same `forward` to `block.mlp`.

    Args:
        widths: the width of the input, of each hidden layer and of the output.
        dropout: probability of a zero, 0 ≤ p < 1. `self.dropout` is the module that holds it.
        backend: "torch", "triton" or "auto", see `ops.Backend`.

    Raises ValueError for fewer than two widths, a width below 1 and a dropout out of range, TypeError for a bool as
    dropout.
    """

    @refuses(layer_sizes="widths", activation="nothing: it is ReLU", name="nothing: layers have numbers")
    def __init__(self, widths: Sequence[int], dropout: float = 0.0, backend: Backend = "auto") -> None:
        super().__init__()
        if len(widths) < 2:
            raise ValueError(f"widths should be those of the input and the output at least, got {list(widths)}")
        for i, width in enumerate(widths):
            check_count(f"widths[{i}]", width, 1)
        check_dropout(dropout)
        self.backend: Backend = backend
        # Names of the layers are their places in a sequence with ReLU and dropout modules, as checkpoints have them.
        step = 3 if dropout > 0 else 2
        self._layer_names = [str(step * i) for i in range(len(widths) - 1)]
        for name, (inputs, outputs) in zip(self._layer_names, pairwise(widths), strict=True):
            self.add_module(name, nn.Linear(inputs, outputs))
        self.dropout = nn.Dropout(dropout)

    @property
    def layers(self) -> tuple[nn.Linear, ...]:
        """The linear layers, first to last. To replace one, `setattr(mlp, name, layer)` by its name in `state_dict`."""
        return tuple(self._modules[name] for name in self._layer_names)  # type: ignore[misc]

    def forward(self, inputs: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
        """Apply the layers to the concatenated inputs and add the residual.

        inputs: (V, C_i) each, with Σ C_i = widths[0]; residual: (V, widths[-1]) or None → (V, widths[-1])
        """
        parameters = self.plain_parameters()
        if parameters is not None:
            (weights, biases), dropout = parameters, self.current_dropout()
            return mlp(inputs, weights, biases, dropout=dropout, residual=residual, backend=self.backend)
        x = torch.cat(list(inputs), dim=-1)
        for i, layer in enumerate(self.layers):
            x = layer(self.dropout(x.relu()) if i > 0 else x)
        return x if residual is None else residual + x

    def plain_parameters(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return weights and biases if kernels may run all layers at once, or None if the layers have to be called."""
        layers = self.layers
        for layer in layers:
            # A layer without a bias has the entry None. Reading `layer.bias` takes as long as the rest.
            if not is_plain(layer, nn.Linear) or layer._parameters.get("bias", layer) is None:
                return None
        if not is_plain(self._modules["dropout"], nn.Dropout):
            return None
        return [layer.weight for layer in layers], [layer.bias for layer in layers]

    def current_dropout(self) -> float:
        """Return the probability of a zero, which is 0 outside of training."""
        dropout = self.dropout
        return dropout.p if dropout.training else 0.0
