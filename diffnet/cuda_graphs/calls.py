"""What calls with features and operators may have graphs, and what these graphs depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from diffnet.cuda_graphs.lane import Recorder, record_graph
from diffnet.cuda_graphs.static_operators import StaticOperators
from diffnet.geometry import Operators
from diffnet.geometry.fields import FIELDS
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.cuda_graph import is_recorded


def uses_graphs(x: Tensor, recorder: Recorder) -> bool:
    """Whether graphs of calls with this tensor can be recorded. On the CPU, tests emulate them."""
    return x.is_cuda or recorder is not record_graph


def may_have_graphs(features: Any, operators: Any, recorder: Recorder) -> bool:
    """Whether the arguments are right and on a GPU. If not, the network itself says what is wrong."""
    return (
        isinstance(features, Tensor)
        and uses_graphs(features, recorder)
        and not under_transforms()
        and isinstance(operators, Operators)
        and not isinstance(operators, StaticOperators)
        and features.is_floating_point()
        and features.ndim == 2
        and features.device == operators.device
        and len(features) == operators.num_vertices > 0
        and not (operators.mass.requires_grad or operators.evals.requires_grad or operators.evecs.requires_grad)
        and not (features.is_cuda and is_recorded())
    )


def kind_of(operators: Operators) -> Hashable:
    """The properties of operators that a recording depends on, except their size."""
    return (
        operators.k,
        operators.mass.dtype,
        operators.evecs.dtype,
        *[getattr(operators, name) is None for name, kind in FIELDS.items() if kind.optional],
        operators.device,
    )


def rows_of(outputs_at: str, operators: Operators) -> int:
    """The rows of the output for a batch."""
    if outputs_at == "vertices":
        return operators.num_vertices
    return len(operators) if outputs_at == "global_mean" else len(getattr(operators, outputs_at))
