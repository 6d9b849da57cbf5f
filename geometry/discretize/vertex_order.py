"""Orders of the vertices that keep neighbors on the surface close to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

# Rows keep their order if the numbers of neighbors differ by less than this on average. 8192 rows of 128 float32 are
# 4 MiB, a tenth of the cache of a large GPU.
MAX_GAP = 8192


def order_along_surface(graph: Any) -> NDArray[np.int64]:
    """The vertices (V,) of a sparse graph (V, V) in reverse Cuthill-McKee order, which is breadth-first."""
    order: NDArray[np.int64] = reverse_cuthill_mckee(graph).astype(np.int64)
    return order


def order_unless_near(graph: Any) -> NDArray[np.int64] | None:
    """`order_along_surface`, or None if the numbers of neighbors already differ by less than MAX_GAP on average."""
    rows = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    if graph.nnz == 0 or np.abs(rows - graph.indices).mean() < MAX_GAP:
        return None
    return order_along_surface(graph)
