"""Operators of torch.library that are cheap to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from diffnet.ops.common.compiler import PLAIN_TYPES, F, is_batched, under_transforms
from diffnet.ops.common.precision import without_autocast


def differentiable(
    name: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    *,
    tensor_lists: bool = False,
) -> Callable[..., Any]:
    """Register a custom operator with a gradient, and return the function that calls it.

    Outside of tracing, the function bypasses PyTorch's dispatcher. Through the dispatcher, a custom operator with a
    gradient takes about 30 µs of CPU time, as an autograd function 8 µs (measured with PyTorch 2.13). Small kernels run
    about as long. Where nothing requires a gradient, `forward` is called alone.

    Args:
        name: of the operator, "diffnet::…"
        forward: computes the outputs. Its signature is the operator's schema.
        fake: returns empty outputs of the right shapes and dtypes
        save: saves tensors for the backward, as the `setup_context` of `torch.library.register_autograd`
        backward: returns a tuple of gradients. For a list of tensors without gradients it returns a list of None.
        tensor_lists: whether the arguments include lists of tensors that have gradients. The output is then a list.
    """
    operator = torch.library.custom_op(name, forward, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=save)

    def computed(*arguments: Any) -> Any:
        output = forward(*arguments)
        return without_base(output) if isinstance(output, Tensor) else tuple(map(without_base, output))

    def forward_of_tensors(ctx: Any, *arguments: Any) -> Any:
        output = computed(*arguments)
        save(ctx, arguments, output)
        return output

    def backward_of_tensors(ctx: Any, *grads: Any) -> Any:
        _refuse_batches(name, grads)
        return tuple(None if isinstance(grad, list) else grad for grad in backward(ctx, *grads))

    def forward_of_lists(ctx: Any, lengths: tuple[int | None, ...], *flat: Any) -> Any:
        rest = iter(flat)
        arguments = [next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths]
        return tuple(forward_of_tensors(ctx, *arguments))

    def backward_of_lists(ctx: Any, *grads: Any) -> Any:
        _refuse_batches(name, grads)
        nested = backward(ctx, list(grads))
        return (None, *(grad for part in nested for grad in (part if isinstance(part, list) else [part])))

    # If the class defines `setup_context`, PyTorch inspects the signature of `forward` in every call.
    methods = (forward_of_lists, backward_of_lists) if tensor_lists else (forward_of_tensors, backward_of_tensors)
    members = {"forward": staticmethod(methods[0]), "backward": staticmethod(methods[1])}
    eager = applied(type(name.replace("::", "_"), (torch.autograd.Function,), members))

    def call(*arguments: Any) -> Any:
        flat = _flattened(arguments) if tensor_lists else arguments
        if _traced(flat):
            return operator(*arguments)
        _refuse_transforms(name)
        if not differentiated(flat):
            return computed(*arguments)
        lengths = [tuple([len(a) if isinstance(a, list) else None for a in arguments])] if tensor_lists else []
        return eager(*lengths, *flat)

    return call


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its search for tensors of torch.func among the arguments."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def without_base(x: Tensor) -> Tensor:
    """Return a tensor with the same memory that is no view. Outputs that are views can't be changed in place."""
    return x.data if x._is_view() else x


def opaque(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    definition: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register a custom operator without a gradient, and return the function that calls it.

    Backward passes call these operators. Differentiating one raises RuntimeError.

    definition: computes the same in plain PyTorch, where second derivatives may follow
    """

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise _only_once(name.removeprefix("diffnet::").removesuffix("_backward"))

    schema = torch.library.infer_schema(implementation, mutates_args=())
    operator = torch.library.custom_op(
        name, functools.partial(_with_separate_outputs, implementation), mutates_args=(), schema=schema
    )
    operator.register_fake(fake)
    operator.register_autograd(refuse)

    def call(*arguments: Any) -> Any:
        flat = _flattened(arguments)
        if definition is not None and differentiated(flat) and not is_traced(flat):
            return definition(*arguments)
        # A direct call would make the result a constant, so a second derivative would be silently wrong.
        return operator(*arguments) if differentiated(flat) or _traced(flat) else implementation(*arguments)

    return call


def derivatives(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    *grads: Tensor,
    needed: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """The gradients of a function in the tensors that need them, by autograd. In grad mode, they have gradients.

    needed: by default for tensors that require a gradient
    """
    needed = [t.requires_grad for t in tensors] if needed is None else needed
    create_graph = torch.is_grad_enabled()
    with without_autocast(tensors[0]), torch.enable_grad():
        views = [t.view_as(t) for t in tensors]  # a tensor may occur twice, and each place has its own gradient
        out = function(*views)
        wanted = [view for view, need in zip(views, needed, strict=True) if need]
        results = iter(torch.autograd.grad(out, wanted, grads, create_graph=create_graph, allow_unused=True))
    return [next(results) if need else None for need in needed]


def _only_once(operation: str) -> RuntimeError:
    return RuntimeError(
        f'the kernels of {operation} can be differentiated once; backend="torch" has derivatives of any order'
    )


def differentiable_once(operation: str) -> Callable[[F], F]:
    """Like `once_differentiable` of PyTorch, for the backward of kernels, with a message that says what to write."""

    class Refusal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise _only_once(operation)

    def decorated(backward: F) -> F:
        def call(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():
                return results
            return applied(Refusal)(*(None if grad is None else grad.detach().requires_grad_() for grad in results))

        return call  # type: ignore[return-value]

    return decorated


def save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Any) -> None:
    """Save all inputs for the backward: a `save` for `differentiable`."""
    ctx.save_for_backward(*inputs)


def save_settings(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A `save` for operators with further arguments: it saves all tensors, and keeps the rest as `ctx.settings`."""
    flat = _flattened(inputs)
    ctx.settings = [x for x in flat if x is not None and not isinstance(x, Tensor)]
    ctx.save_for_backward(*[x for x in flat if x is None or isinstance(x, Tensor)])


def empty_like(*places: int) -> Callable[..., Any]:
    """A `fake` for operators: contiguous results with the shapes and dtypes of the arguments at these places."""

    def fake(*arguments: Any) -> Any:
        results = [torch.empty_like(arguments[i], memory_format=torch.contiguous_format) for i in places]
        return results[0] if len(places) == 1 else tuple(results)

    return fake


def _with_separate_outputs(implementation: Callable[..., Any], *arguments: Any) -> Any:
    """Copy outputs that are views of a larger tensor, because PyTorch's graphs allow no such outputs."""
    outputs = implementation(*arguments)
    if isinstance(outputs, Tensor):
        return outputs
    return type(outputs)(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in outputs)


def _flattened(arguments: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for a in arguments:
        if isinstance(a, (list, tuple)):
            flat += a
        else:
            flat.append(a)
    return flat


def differentiated(arguments: Sequence[Any]) -> bool:
    """Return whether autograd has to see a call, by reverse or by forward mode."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for a in arguments:  # a loop takes half the time of `any`
            if isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


def is_traced(arguments: Sequence[Any]) -> bool:
    """Return whether a call has to go through PyTorch's dispatcher, or is refused under a transform of torch.func."""
    return under_transforms() or _traced(arguments)


def _traced(arguments: Sequence[Any]) -> bool:
    """Return whether the registered operator has to be called. On the meta device it calls `fake`."""
    if torch.compiler.is_compiling():
        return True
    for a in arguments:  # a loop takes half the time of `any`
        if type(a) in PLAIN_TYPES:
            if a.is_meta:
                return True
        elif isinstance(a, Tensor):
            return True
    return False


def _refuse_transforms(name: str) -> None:
    if under_transforms() or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{name.removeprefix('diffnet::')} on kernels doesn't work under transforms of torch.func and in forward "
            'mode; backend="torch" and "auto" do'
        )


def _refuse_batches(name: str, grads: Sequence[Any]) -> None:
    if not torch.compiler.is_compiling() and is_batched(*(grad for grad in grads if isinstance(grad, Tensor))):
        raise RuntimeError(
            f"{name.removeprefix('diffnet::')} computes one gradient at a time, not several as is_grads_batched "
            'and vmap ask; networks of backend="torch" without implicit diffusion do'
        )
