"""The operators of torch.library: schemas, fake implementations, aliasing, and second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float64 import DEVICE
from kernel_accuracy import Place, pointer
from sparse_cases import (
    backends,
    random_pattern,
    small_pieces as small_pieces,  # a fixture
)
from torch import Tensor

from diffnet.ops import (
    Backend,
    BlockPattern,
    Pattern,
)
from diffnet.ops.block_sparse.pattern import block_arrays
from diffnet.ops.common.matmul import operands
from diffnet.ops.common.precision import dot_precision, empty_table
from diffnet.ops.sparse.pattern import csr_arrays, product_arrays

pytestmark = pytest.mark.usefixtures("one_thread", "small_pieces")


def operator_calls(place: Place) -> dict[str, list[tuple[Any, ...]]]:
    def leaf(*shape: int, dtype: torch.dtype = place.dtype) -> Tensor:
        return torch.randn(*shape, device=place.device, dtype=dtype, requires_grad=True)

    ptr = pointer((4, 0, 3)).to(place.device)
    x, evecs, mass, gradient_evecs = leaf(7, 5), leaf(7, 3), leaf(7), leaf(2, 7, 3)
    d, evals, time = leaf(3, 3, 5, dtype=torch.float32), torch.rand(3, 3, device=place.device), leaf(5)
    a, b = leaf(5, 5), leaf(5, 5)
    fixed_evecs, fixed_mass, fixed_gradient_evecs, fixed_x, fixed_d, fixed_a, fixed_time = (
        t.detach() for t in (evecs, mass, gradient_evecs, x, d, a, time)
    )
    labels = torch.tensor([0, 4, -1, 2, 1, 3, 0], device=place.device)
    seeds = torch.randint(2**31, (1, 2), device=place.device)
    inputs, weights, biases = [x, leaf(7, 5)], [leaf(4, 10), leaf(6, 4)], [leaf(4), leaf(6)]
    constants, fixed_weights = ([t.detach() for t in group] for group in (inputs, weights))
    matrices = operands(fixed_weights, place.dtype, dot_precision(x))
    hidden = [leaf(7, 4).detach()]
    features_saved = []
    for turned in (None, fixed_a):
        table = empty_table(fixed_evecs, fixed_d, turned is not None).zero_()
        features_saved.append((fixed_d, fixed_a, turned, fixed_evecs, fixed_gradient_evecs, ptr, table))
    symmetric, system = torch.eye(3, device=place.device)[None] + 0.1, torch.rand(1, 4, 3, device=place.device)
    return {
        "solve_rows": [
            (symmetric.requires_grad_(), system.clone().requires_grad_(), leaf(1, 4, 3, dtype=torch.float32), triton)
            for triton in (False, True)
        ],
        "soft_map": [(leaf(7, 5), leaf(4, 5), leaf(4, 3))],
        "soft_map_backward": [(fixed_x, fixed_x, fixed_x, fixed_x, fixed_x, fixed_mass)],
        "project": [(x, evecs, mass, ptr), (x, evecs, None, ptr)],
        "evaluate": [(d, evecs, mass, ptr)],
        "diffuse": [(leaf(3, 3, 5, dtype=torch.float32), leaf(3, 3), leaf(5))],
        "diffuse_backward": [(fixed_d, fixed_d, evals, fixed_time)],
        "spectral_gradient_features": [
            (d, a, b, fixed_evecs, fixed_gradient_evecs, ptr, True),
            (d, a, None, None, fixed_gradient_evecs, ptr, False),
        ],
        "spectral_gradient_features_backward": [
            (values_grad, fixed_x, *saved, False)
            for saved, values_grad in zip(features_saved, (None, fixed_x), strict=True)
        ],
        "gradient_features": [(leaf(2, 7, 5), a, leaf(5, 5), True)],
        "gradient_features_pointwise_backward": [(fixed_x, leaf(2, 7, 5).detach(), fixed_a, None, False)],
        "cross_entropy": [(x, labels, -1)],
        "cross_entropy_backward": [(fixed_mass, fixed_x, labels, -1)],
        "mlp": [
            (inputs, weights, [], biases, leaf(7, 6), False, 0.5, seeds, True),
            (inputs, weights, matrices, biases, None, False, 0.0, None, True),
            ([fixed_x], [leaf(4, 5)], [], [], None, False, 0.0, None, False),
        ],
        "mlp_backward": [
            (leaf(7, 6).detach(), constants, matrices, hidden, False, 0.5, need_inputs) for need_inputs in (True, False)
        ],
    }


def sparse_operator_calls(device: str, triton: bool) -> dict[str, list[tuple[Any, ...]]]:
    """The same for operators on sparse patterns. Without Triton, PyTorch's own sparse products compute some of them."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    pattern = random_pattern("skewed").to(device)
    arrays, (rows, columns) = product_arrays(pattern, triton), pattern.shape
    values, x, y = leaf(2, pattern.nnz), leaf(1, columns, 3), leaf(2, rows, 3)
    scores = values.detach()
    blocks = BlockPattern.from_mask(torch.tensor([[[True, False], [True, True]]] * 2), 16, 20, 18).to(device)
    structure, block_values = block_arrays(blocks), leaf(1, *blocks.values_shape)
    a, b = leaf(1, 2, 20, 16), leaf(1, 2, 18, 16)
    edge = Pattern(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), 2).to(device)
    positive = torch.ones(2, device=device)
    laplacian = torch.tensor([1.0, -1.0, -1.0, 1.0], device=device, requires_grad=True)
    system = (positive, laplacian, positive.clone().requires_grad_(), torch.ones(3, device=device, requires_grad=True))
    calls = {
        "spmm": [(arrays, values, x, False, False, triton), (arrays, values, y, True, True, triton)],
        "sddmm": [(arrays, y, x, triton)],
        "sparse_softmax": [(arrays[:5], values, scores > 0, 0.5)],
        "sparse_softmax_backward": [(arrays[:5], scores, scores, 0.5)],
        "block_sdd": [(structure, a, b, 16, 20, 18)],
        "block_dsd": [(structure, block_values, b, 16, 20, 18, False)],
        "block_attention": [(structure, a, b, b, None, None, 0.5, 16)],
        "block_softmax": [(*structure[:2], block_values, leaf(*blocks.values_shape), None, None, 0.5, 20, 18)],
        "block_softmax_backward": [(structure[0], block_values.detach(), block_values.detach(), 0.5)],
        "implicit_solve": [
            (
                list(csr_arrays(edge, triton)),
                torch.tensor([0, 2], device=device),
                *system,
                leaf(2, 3),
                [2],
                1e-6,
                8,
                2,
                triton,
            )
        ],
    }
    return calls if triton else {name: calls[name] for name in ("spmm", "sddmm", "implicit_solve")}


def check_operator(name: str, calls: list[tuple[Any, ...]], traced: bool) -> None:
    """Check what torch.compile and torch.export rely on: schema, fake implementation, autograd and, if traced, a graph.

    A graph calls the same implementations, so one call shows that it is right. Gradients have no derivatives to trace.
    """
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for i, arguments in enumerate(calls):
        graph = ("test_aot_dispatch_dynamic",) if traced and i == 0 and not name.endswith("_backward") else ()
        torch.library.opcheck(getattr(torch.ops.diffnet, name).default, arguments, test_utils=checks + graph)


def test_operators_are_well_formed(any_place: Place) -> None:
    for name, calls in operator_calls(any_place).items():
        check_operator(name, calls, True)


@backends
def test_operators_of_both_backends_are_well_formed(backend: Backend) -> None:
    for name, calls in sparse_operator_calls(DEVICE, backend == "triton").items():
        check_operator(name, calls, traced=backend == "torch" or name not in ("spmm", "sddmm", "implicit_solve"))
