"""Orders of the vertices in which neighbours on the surface are near each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

# Vertices whose numbers differ by less than this are near each other: so many rows of 128 float32 are 4 MiB, a tenth
# of the cache of a large GPU.
NEAR = 8192


def order_along_surface(graph: Any) -> NDArray[np.int64]:
    """(V,) the vertices of a sparse graph (V, V) by reverse Cuthill and McKee, that is breadth first."""
    order: NDArray[np.int64] = reverse_cuthill_mckee(graph).astype(np.int64)
    return order


def order_unless_near(graph: Any) -> NDArray[np.int64] | None:
    """The same; None where neighbours have numbers near each other as it is, on average."""
    rows = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    if graph.nnz == 0 or np.abs(rows - graph.indices).mean() < NEAR:
        return None
    return order_along_surface(graph)
