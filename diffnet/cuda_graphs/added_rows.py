"""Whether the rows that buffers add to a batch change the results of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.arena import Arena
from diffnet.cuda_graphs.buffers import BatchBuffers
from diffnet.cuda_graphs.graphed_class import plain_class
from diffnet.cuda_graphs.module_state import GRAPHS, MACHINERY
from diffnet.cuda_graphs.random_numbers import same_random_numbers
from diffnet.cuda_graphs.recording import check_output, trial
from diffnet.cuda_graphs.replica import Replica, widened
from diffnet.cuda_graphs.sizes import BatchSize, size_of
from diffnet.cuda_graphs.static_operators import StaticOperators
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable
from diffnet.ops.common.launcher import saved_as_usual

Results = dict[str, Tensor]

ADDED_SCALE = 8.0  # scale of the features of added rows, relative to the batch; large features show their effect
PERTURBATION = 1e-6  # relative change of the features; its effect shows how far rounding errors grow
GRADIENT = "the gradient of"  # prefix of the names of gradients among the results
MAX_ROUNDING = 1e-4  # relative differences up to this are taken for rounding

# Modules of PyTorch that compute each row on its own.
_BY_ROWS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.ReLU, nn.Identity, nn.ModuleList, nn.Sequential)
_FUNCTIONS = ("log_softmax", "sigmoid", "tanh", "relu")


def is_known(network: nn.Module) -> bool:
    """Whether added rows can't change the results, because all modules are diffnet's or compute each row on its own.

    It is False if a module has another function among its attributes, such as a `last_activation` of the user.
    """
    for module in network.modules():
        cls = plain_class(module)
        if cls not in _BY_ROWS and not cls.__module__.startswith("diffnet."):
            return False
        others = (value for name, value in vars(module).items() if name not in MACHINERY and name != GRAPHS)
        if not all(_is_known_function(value) for value in others if callable(value)):
            return False
    return True


def _is_known_function(function: Any) -> bool:
    package = (getattr(function, "__module__", None) or "torch").partition(".")[0]  # builtins of PyTorch have None
    return package in ("torch", "diffnet") and getattr(function, "__name__", None) in _FUNCTIONS


def check_added_rows(
    network: nn.Module,
    rows: str,
    size: BatchSize,
    counted: frozenset[str],
    features: Tensor,
    operators: Operators,
    further: Sequence[Tensor] = (),
) -> None:
    """Call a network on a batch, and on buffers of two sizes that hold it, and compare all results.

    These are the output, the gradients of the features and the parameters for random gradients of the output, and the
    network's buffers afterwards. Dropout is the same in all calls. They run without autocast and in float32 at least,
    so rounding errors are small. A difference is one of rounding unless it is much larger than the effect of a small
    change of the features. The network and the random generators stay as they are.

    rows: the count of `BatchSize` that gives the rows of the output
    size: of the buffers. The second size is twice as large.
    counted: see `size_of`
    further: further arguments of the network, with a row for each mesh

    Raises NotCounted, see `BatchBuffers`, and NotCapturable, which says what differs.
    """
    batch = size_of(operators, counted | ({rows} & {"faces", "edges"}))
    wants_gradient = features.requires_grad and torch.is_grad_enabled()

    def results(x: Tensor, operators: Any, size: BatchSize) -> Results:
        replica, leaf = Replica(network, copies_buffers=True, precise=True), x.detach().requires_grad_(wants_gradient)
        with same_random_numbers(x.device):
            out = replica(leaf, operators, *(_with_rows(x, len(operators)) for x in further))
            if not isinstance(operators, StaticOperators):  # another size may fill a cache
                replica.check_attributes()
            check_output(out, getattr(size, rows))
            out = out[: getattr(batch, rows)]
            found = {"the output": out.detach()}
            names = [name for name, _ in network.named_parameters()]
            inputs = dict(zip(("the features", *names), (leaf, *replica.parameters), strict=True))
            needed = [name for name, each in inputs.items() if each.requires_grad] if out.requires_grad else []
            if needed:
                grads = torch.autograd.grad(out, [inputs[n] for n in needed], _normal(out), allow_unused=True)
                found |= {f"{GRADIENT} {n}": grad for n, grad in zip(needed, grads, strict=True) if grad is not None}
        of_features = f"{GRADIENT} the features"
        if of_features in found:
            found[of_features] = found[of_features][: batch.vertices]
        return found | {f"the buffer {name}": buffer for name, buffer in replica.network.named_buffers()}

    def on_buffers(size: BatchSize) -> Results:
        static = StaticOperators(BatchBuffers(Arena(features.device, size), size, counted, operators))
        added = features.new_empty(size.vertices - batch.vertices, features.shape[1])
        return results(torch.cat([features, _normal(added) * _scale(features) * ADDED_SCALE]), static, size)

    with saved_as_usual(), trial(), _precise(features.device.type):
        features = widened(features.detach())
        expected, again = (results(features, operators, batch) for _ in range(2))
        different = _difference(expected, again)
        if different is not None:
            raise NotCapturable(f"two calls on the same batch differ in {different}")
        changed = results(features * (1 + PERTURBATION * _normal(features)), operators, batch)
        doubled = BatchSize(size.meshes if size.meshes == 1 else 2 * size.meshes, *(2 * n for n in size[1:]))
        for each in (size, doubled):
            different = _difference(expected, on_buffers(each), changed)
            if different is not None:
                raise NotCapturable(
                    f"rows that are added to a batch change {different}, so it reduces over vertices or counts them"
                )


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """A tensor with rows of zeros at its end, in the precision of `Replica`."""
    return torch.cat([widened(x), widened(x.new_zeros(rows - len(x), *x.shape[1:]))])


def _normal(like: Tensor) -> Tensor:
    """Normal random numbers in the shape, dtype and device of a tensor, the same in every call."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)


def _scale(features: Tensor) -> Tensor:
    """The root mean square of features; 1 if all are 0."""
    scale = features.square().mean().sqrt()
    return torch.where(scale > 0, scale, 1)


@contextmanager
def _precise(device: str) -> Iterator[None]:
    """Multiply matrices in the dtype of the factors."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        products.fp32_precision = before


def _difference(expected: Results, found: Results, changed: Results | None = None) -> str | None:
    """The first result that differs, with the relative difference. None if only rounding differs.

    changed: results after a small change of the features
    """
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())[0]
    gradients = [each for name, each in expected.items() if name.startswith(GRADIENT)]
    whole = sum(_norm(grad) ** 2 for grad in gradients) ** 0.5
    for name, value in expected.items():
        error, norm = _distance(value, found[name]), _norm(value)
        noise = 0.0 if changed is None else _distance(value, changed[name])
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        rounding = max(MAX_ROUNDING, 4 * eps)  # an output may be rounded to 16 bits
        # A gradient may be 0 up to rounding, so the norm of all gradients counts, too.
        allowed = 10 * noise + rounding * (norm + whole / 100 * name.startswith(GRADIENT))
        if not error <= allowed:
            return f"{name} by {error / norm:.2%}" if norm > 0 else name
    return None


def _norm(x: Tensor) -> float:
    return float(x.detach().double().nan_to_num(0, 0, 0).norm())


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖, which is 0 where both have the same infinity or NaN."""
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())
