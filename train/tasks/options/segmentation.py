"""The options of segmentation."""

from __future__ import annotations

from dataclasses import replace

from diffnet.train.tasks.options.labels import LABELED
from diffnet.train.tasks.options.shared import SharedOptions

# On RNA, with 260 classes and 15,000 vertices, the default of dropout costs 0.9 points, see docs/recipe.md.
MANY_CLASSES = 100
FINE = 5_000  # vertices of a mesh
LESS_DROPOUT = 0.2


def _advice(options: SharedOptions, classes: int, vertices: float) -> str | None:
    """Advise less dropout for many classes on fine meshes.

    >>> _advice(SharedOptions(), 260, 15_000)
    '260 classes on meshes of 15,000 vertices: --dropout 0.2 may be more accurate'
    >>> _advice(SharedOptions(), 8, 15_000)
    """
    if classes < MANY_CLASSES or vertices < FINE or options.dropout <= LESS_DROPOUT:
        return None
    return f"{classes} classes on meshes of {vertices:,.0f} vertices: --dropout {LESS_DROPOUT} may be more accurate"


OPTIONS = replace(LABELED, generated="figures", advice=_advice)
