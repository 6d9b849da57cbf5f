"""Operators of torch.library that cost little to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def differentiable(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    lists: bool = False,
    passes: bool = False,
) -> Callable[..., Any]:
    """A custom operator with its fake implementation and its gradient, and the function by which to call it.

    Where nothing is traced the function goes round the dispatcher, whose way to a custom operator with a gradient takes
    some 30 µs on a CPU to 8 µs of an autograd function (measured with PyTorch 2.13), as long as small kernels run.

    backward: returns a tuple, with a list of as many None for a list of tensors that have no gradients
    lists: whether lists among the arguments hold tensors that have gradients; the output is a list then, too
    passes: return the first argument before the outputs. Who goes on with it there, rather than with what was given,
        leaves it to `backward` to add the gradient that it gets: that is the first, None where there is none, and
        always None where something is traced, since a custom operator returns nothing that it was given.
    """
    operator = torch.library.custom_op(name, implementation, mutates_args=())
    operator.register_fake(fake)
    unpassed = functools.partial(_without_passed, backward) if passes else backward
    operator.register_autograd(unpassed, setup_context=setup_context)

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = implementation(*arguments)
        setup_context(ctx, arguments, output)
        return (arguments[0], *output) if passes else output

    def backward_of_tensors(ctx: Any, *grads: Any) -> Any:
        return tuple(None if isinstance(grad, list) else grad for grad in backward(ctx, *grads))

    def forward_of_lists(ctx: Any, lengths: tuple[int | None, ...], *flat: Any) -> Any:
        rest = iter(flat)
        arguments = [next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths]
        return tuple(forward(ctx, *arguments))

    def backward_of_lists(ctx: Any, *grads: Any) -> Any:
        nested = backward(ctx, list(grads))
        return (None, *(grad for part in nested for grad in (part if isinstance(part, list) else [part])))

    # With a setup_context of its own, PyTorch looks up the signature of `forward` in every call.
    methods = (forward_of_lists, backward_of_lists) if lists else (forward, backward_of_tensors)
    named = {"forward": staticmethod(methods[0]), "backward": staticmethod(methods[1])}
    eager: Any = type(name.replace("::", "_"), (torch.autograd.Function,), named)

    def call(*arguments: Any) -> Any:
        if not _traced(arguments):
            return eager.apply(*arguments)
        return (arguments[0], *operator(*arguments)) if passes else operator(*arguments)

    def call_with_lists(*arguments: Any) -> Any:
        flat = _flat(arguments)
        if _traced(flat):
            return operator(*arguments)
        return eager.apply(tuple(len(a) if isinstance(a, list) else None for a in arguments), *flat)

    return call_with_lists if lists else call


def opaque(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The same for an operator without a gradient, which backward passes call. To differentiate it is an error."""
    schema = torch.library.infer_schema(implementation, mutates_args=())
    apart = functools.partial(_call_apart, implementation)
    operator = torch.library.custom_op(name, apart, mutates_args=(), schema=schema)
    operator.register_fake(fake)

    def call(*arguments: Any) -> Any:
        flat = _flat(arguments)
        # What goes round the dispatcher would pass for a constant, were a gradient itself differentiated.
        differentiated = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in flat)
        return operator(*arguments) if differentiated or _traced(flat) else implementation(*arguments)

    return call


def _without_passed(backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    return backward(ctx, None, *grads)


def _call_apart(implementation: Callable[..., Any], *arguments: Any) -> Any:
    """Outputs that are parts of one tensor, as they may not be in PyTorch's graphs, become tensors of their own."""
    outputs = implementation(*arguments)
    if isinstance(outputs, Tensor):
        return outputs
    return type(outputs)(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in outputs)


def _flat(arguments: Sequence[Any]) -> list[Any]:
    return [x for a in arguments for x in (a if isinstance(a, (list, tuple)) else [a])]


def _traced(arguments: Sequence[Any]) -> bool:
    return torch.compiler.is_compiling() or any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in arguments)


def save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
