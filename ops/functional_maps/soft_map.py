"""Soft maps of points, which are attention without a table of all pairs.

The CPU and GPUs compute it alike: a chunk of rows at a time, by matrix products. Scores are computed again in the
backward pass (Dao et al. 2022, FlashAttention), from the logarithms of their sums. docs/functional_maps.md has the
derivation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import use_definition
from diffnet.ops.common.checks import check_finite, check_tensor, readable
from diffnet.ops.common.dispatch import derivatives, differentiable, empty_like, opaque
from diffnet.ops.common.precision import sum_dtype, without_autocast
from diffnet.ops.functional_maps.nearest import table_rows
from diffnet.ops.functional_maps.op import checked_number


def soft_map(queries: Tensor, keys: Tensor, values: Tensor, temperature: float | Tensor) -> Tensor:
    """Compute Π values with the soft map Π = softmax(queries keysᵀ / temperature).

    Π maps functions on the points of the keys to functions on the points of the queries. No table (N, M) is stored,
    forward or backward. Differentiable in all arguments. Second derivatives and transforms of torch.func store it.

    It is computed in float32, or in float64 if an argument is float64. Matrix products in float32 follow
    `torch.set_float32_matmul_precision`.

    Args:
        queries: (N, C) floating point, features of the points that receive values. Features are often of length 1
            (`torch.nn.functional.normalize`).
        keys: (M, C) floating point, features of the points that have values; M is at least 1
        values: (M, K) floating point
        temperature: above 0; a number, or a tensor of shape ()

    Returns:
        (N, K) in the promoted dtype, and in float32 for lower precision

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes or devices. On the CPU and in debug mode also for values that are not finite, for
            features so large that their products overflow, and a temperature that is not above 0.

    >>> points = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> soft_map(points, points, torch.tensor([[2.0], [4.0]]), temperature=0.01)
    tensor([[2.],
            [4.]])
    """
    check_tensor("queries", queries, ("N", "C"))
    (_, channels), device = queries.shape, queries.device
    check_tensor("keys", keys, ("M", channels), device)
    check_tensor("values", values, (len(keys), "K"), device)
    if len(keys) == 0:
        raise ValueError(f"keys should have at least one row, shape is {tuple(keys.shape)}")
    for name, x in {"queries": queries, "keys": keys, "values": values}.items():
        check_finite(name, x)
    temperature = checked_number("temperature", temperature, device, positive=True)
    dtype = sum_dtype(queries, keys, values)
    inputs = queries.to(dtype) / temperature, keys.to(dtype), values.to(dtype)
    out: Tensor = _plain(*inputs) if use_definition("auto") else _operator(*inputs)[0]
    if readable(out) and not out.isfinite().all():
        raise ValueError(
            f"queries keysᵀ / temperature should be finite in {dtype}, but queries reach {queries.abs().max():.3g} and "
            f"keys {keys.abs().max():.3g}; scale their rows to length 1 (torch.nn.functional.normalize)"
        )
    return out


def _plain(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with without_autocast(queries):
        return torch.softmax(queries @ keys.mT, 1) @ values


def _forward(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """queries (N, C), keys (M, C), values (M, K) → (N, K), and the logarithms of the sums (N,)"""
    out, sums = queries.new_empty(len(queries), values.shape[1]), queries.new_empty(len(queries))
    with without_autocast(queries):
        for rows in table_rows(len(queries), queries, len(keys)):
            scores = queries[rows] @ keys.mT
            top = scores.amax(1, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(1, keepdim=True)
            torch.mm(weights, values, out=out[rows])
            out[rows] /= total
            sums[rows] = (top + total.log())[:, 0]
    return out, sums


def _fake(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape[0], values.shape[1]), queries.new_empty(queries.shape[0])


def _gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
    grad_keys = torch.zeros_like(keys, memory_format=torch.contiguous_format)
    grad_values = torch.zeros_like(values, memory_format=torch.contiguous_format)
    along = (grad * out).sum(1, keepdim=True)
    with without_autocast(queries):
        for rows in table_rows(len(queries), queries, len(keys)):
            weights = (queries[rows] @ keys.mT).sub_(sums[rows, None]).exp_()
            grad_values.addmm_(weights.mT, grad[rows])
            grad_scores = (grad[rows] @ values.mT).sub_(along[rows]).mul_(weights)
            torch.mm(grad_scores, keys, out=grad_queries[rows])
            grad_keys.addmm_(grad_scores.mT, queries[rows])
    return grad_queries, grad_keys, grad_values


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(_gradients_operator(grad, *ctx.saved_tensors))


def _plain_gradients(grad: Tensor, *tensors: Tensor) -> list[Tensor | None]:
    return derivatives(_plain, tensors[:3], grad)


_gradients_operator = opaque("diffnet::soft_map_backward", _gradients, empty_like(1, 2, 3), _plain_gradients)
_operator = differentiable("diffnet::soft_map", _forward, _fake, _save, _backward)
