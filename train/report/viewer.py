"""An interactive HTML page of labeled surfaces. It needs no network and no libraries."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt
from diffnet.train.report.export import fill_template, write_atomically
from diffnet.train.report.palette import ERROR_COLORS, UNLABELED_COLOR, label_colors
from diffnet.train.report.surface import check_labeled, corner_normals, face_elements, shown_points
from diffnet.train.report.view import default_view


class ViewerItem(NamedTuple):
    """One mesh or point cloud of a page, with one or several sets of labels.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    labels: by name, each (V,), (F,) or (E,) integers, according to `at`, negative where unlabeled. If one set is called
        "prediction" and another "truth", the page also shows the errors.
    """

    title: str
    verts: Any
    faces: Any
    labels: Mapping[str, Any]
    at: LabelsAt = "vertices"


def write_html(
    path: str | os.PathLike[str],
    items: Iterable[ViewerItem | tuple[str, Any, Any, Mapping[str, Any], LabelsAt]],
    label_names: Sequence[str],
    *,
    title: str = "Labeled surfaces",
) -> None:
    """Write a page that shows labeled meshes and point clouds in any browser with WebGL 2, also from a local file.

    label_names: the names of the labels 0, 1, …; a label without a name is shown as its number
    title: the page's heading

    Raises ValueError if there are no items, if an item has no labels, or if shapes do not fit.
    """
    packed = [_pack(ViewerItem(*item)) for item in items]
    if not packed:
        raise ValueError("a page needs at least one mesh or point cloud")
    highest = max(int(item["highest"]) for item in packed)
    data = {
        "names": [str(name) for name in label_names],
        "colors": _base64(label_colors(max(len(label_names), highest + 1))),
        "unlabeledColor": list(UNLABELED_COLOR),
        "errorColors": _base64(ERROR_COLORS),
        "items": packed,
    }
    write_atomically(path, fill_template("viewer.html", title=html.escape(title), data=_json_in_html(data)))


def _pack(item: ViewerItem) -> dict[str, Any]:
    """An item as viewer.html reads it: numbers, text, and little-endian arrays in base 64."""
    if not item.labels:
        raise ValueError(f"{item.title}: an item needs at least one set of labels")
    sets = {}
    for name, labels in item.labels.items():
        verts, faces, sets[str(name)] = check_labeled(item.verts, item.faces, labels, item.at)
    shown = shown_points(verts, faces)
    if not len(shown):
        shown = np.zeros((1, 3))
    view = default_view(shown)
    low, high = shown.min(axis=0), shown.max(axis=0)
    center = (low + high) / 2
    finite = np.isfinite(verts[faces]).all(axis=(1, 2))
    normals = np.zeros((len(faces), 3, 3))
    normals[finite] = corner_normals(verts, faces[finite])
    index: type[np.uint16 | np.uint32] = np.uint16 if len(verts) <= 0xFFFF else np.uint32
    return {
        "title": str(item.title),
        "at": item.at,
        "up": view.up,
        "azimuth": view.azimuth,
        "elevation": view.elevation,
        "radius": float(np.linalg.norm(shown - center, axis=1).max()) or 1.0,
        "ball": 0.55 * float(np.sqrt(np.prod(np.sort(high - low)[1:]) / len(shown))),
        "positions": _base64((verts - center).astype("<f4")),
        "faces": _base64(faces.astype(index)),
        "wideIndices": index is np.uint32,
        "normals": _base64((normals * 127).round().astype(np.int8)),
        "elements": _base64(face_elements(faces, item.at).astype("<u4")) if item.at == "edges" else "",
        "sets": [{"name": name, "labels": _base64(labels.astype("<i4"))} for name, labels in sets.items()],
        "highest": max(int(labels.max(initial=-1)) for labels in sets.values()),
    }


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _json_in_html(data: Any) -> str:
    """JSON that is safe inside HTML: no string in it can end the script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
