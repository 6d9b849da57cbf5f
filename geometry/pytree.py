"""`Operators` as nodes of PyTorch's trees, so that `torch.export` and functions on trees see their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

# PyTorch documents only `torch.export.register_dataclass`, which would make the number of columns a leaf of its own.
from torch.utils import _pytree as pytree

from diffnet.geometry.edges import Edges
from diffnet.geometry.fields import FIELDS, Fields
from diffnet.ops import Pattern, SparseMatrix

# Higher rooms import the first three from here.
from diffnet.ops.common.checks import check_count as check_count, check_integer as check_integer
from diffnet.ops.common.memo import FieldwiseCopy as FieldwiseCopy, remember


def register_tree(
    cls: type[Fields], edges_of: Callable[[Any], Edges | None], make: Callable[[dict[str, Any], Edges | None], Fields]
) -> None:
    """Make the fields of operators the children of a node. A matrix is a dictionary of its arrays.

    The last child is the edges of one mesh, or None if they aren't known. The structure holds no sizes, so an exported
    network can leave them open.

    edges_of: the edges of operators, if they are known
    make: makes operators from fields and edges, without checks, because functions on trees put other objects in place
        of tensors
    """

    def flatten(operators: Any) -> tuple[list[Any], None]:
        edges = edges_of(operators)
        pairs = None if edges is None or len(edges.lengths) != 1 else edges.pairs
        return [*(_as_tree(getattr(operators, name)) for name in FIELDS), pairs], None

    def flatten_with_keys(operators: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
        keys = [pytree.GetAttrKey(name) for name in (*FIELDS, "edges")]
        return list(zip(keys, flatten(operators)[0], strict=True)), None

    def unflatten(children: Iterable[Any], _: None) -> Fields:
        *values, edges = children
        fields = dict(zip(FIELDS, map(_from_tree, values), strict=True))
        return make(fields, Edges(edges, (edges.shape[0],)) if isinstance(edges, Tensor) else None)

    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name="diffnet.Operators", flatten_with_keys_fn=flatten_with_keys
    )


def _as_tree(value: Any) -> Any:
    if isinstance(value, SparseMatrix):
        return {**_as_tree(value.pattern), "values": value.values}
    if isinstance(value, Pattern):
        return {"indptr": value.stored_indptr, "indices": value.stored_indices, "row_order": value.row_order}
    return value


def _from_tree(child: Any) -> Any:
    if not isinstance(child, dict):
        return child
    indptr = child["indptr"]
    columns = indptr.shape[0] - 1 if isinstance(indptr, Tensor) else 0  # all matrices are square
    pattern = Pattern(indptr, child["indices"], columns, child["row_order"], check=False)
    if "values" not in child:
        return pattern
    return remember(object.__new__(SparseMatrix), pattern=pattern, values=child["values"])
