"""Interactive HTML pages of surfaces and their values. They need no network and no libraries."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.files import write_atomically
from diffnet.viz.fields import MISSING_COLOR, Field
from diffnet.viz.palette import DISTINCT, ERROR_COLORS, ColorMap, label_colors, ticks
from diffnet.viz.render import ARROW_COLOR
from diffnet.viz.shapes import Meshes, Shape, check_names, make_shapes, scales_of
from diffnet.viz.surface import Surface, ValuesAt, View, corner_normals, face_elements, shown_points, view_for


@dataclass(frozen=True, eq=False, repr=False)
class Page:
    """An HTML page. Notebooks show it in a frame.

    html: the page's text
    height: of the frame, in pixels
    """

    html: str
    height: int = 520

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, which any browser with WebGL 2 opens. Raises OSError if it can't be written."""
        write_atomically(path, self.html)

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" style="width:100%;height:{self.height}px;border:0" '
            'title="surfaces" allowfullscreen></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({len(self.html):,} characters)"


def page(
    mesh: Meshes,
    *,
    labels: Any = None,
    scalars: Any = None,
    colors: Any = None,
    vectors: Any = None,
    frames: Any = None,
    at: ValuesAt | Mapping[str, ValuesAt] | None = None,
    label_names: Sequence[str] | Mapping[str, Sequence[str]] = (),
    color_map: ColorMap | Mapping[str, ColorMap] = "viridis",
    range: tuple[float, float] | Mapping[str, tuple[float, float]] | None = None,
    titles: str | Sequence[str] | None = None,
    view: View | tuple[float, float] | None = None,
    heading: str = "Surfaces",
) -> Page:
    """A page that shows meshes and point clouds with their values. They turn with the mouse, by touch and with keys.

    The arguments are those of `picture`. In addition:

    labels, scalars, colors: also several by name, for example `scalars={"height (m)": h, "curvature (1/m)": c}`. The
        page switches between them. Of labels called "prediction" and "truth", it also shows the errors.
    at: also by the name of the values
    label_names: also by the name of the labels
    color_map, range: also by the name of the scalars
    vectors: also by the name of values, for example `vectors={"height (m)": gradient}`. The page shows these arrows
        with these values only.
    titles: the name of each shape. The page shows several shapes side by side, or one of them.
    heading: the page's heading

    Raises ValueError for arguments that do not fit, and MeshError for a mesh that can't be used.

    >>> triangle = ([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]])
    >>> page(triangle, scalars={"x": [0.0, 1.0, 0.0], "y": [0.0, 0.0, 1.0]}).save("triangle.html")
    """
    values = {"labels": labels, "scalars": scalars, "colors": colors, "vectors": vectors, "frames": frames}
    shapes = make_shapes(mesh, at, titles, **values)
    scales = scales_of(shapes, color_map, range)
    every = [field for shape in shapes for field in shape.fields]
    labeled = [field for field in every if field.kind == "labels"]
    check_names("label_names", label_names, (field.name for field in labeled))
    by_name = label_names if isinstance(label_names, Mapping) else {field.name: label_names for field in labeled}
    names = {name: list(map(str, each)) for name, each in by_name.items()}
    highest = max((int(field.values.max(initial=-1)) for field in labeled), default=-1)
    if highest > np.iinfo(np.int32).max:
        raise ValueError(f"labels: a page shows labels up to {np.iinfo(np.int32).max}, got {highest}")
    data = {
        "names": names,
        "colors": _base64(label_colors(min(max([highest + 1, *map(len, names.values())]), DISTINCT))),
        "missingColor": list(MISSING_COLOR),
        "errorColors": _base64(ERROR_COLORS),
        "arrowColor": list(ARROW_COLOR),
        "scales": {
            name: {
                "low": scale.low,
                "high": scale.high,
                "table": _base64(scale.table),
                "ticks": [{"value": value, "text": text} for value, text in ticks(scale.low, scale.high)],
            }
            for name, scale in scales.items()
        },
        "items": [_pack(shape, i, view) for i, shape in enumerate(shapes)],
    }
    text = fill_template("diffnet.viz", "viewer.html", title=html.escape(heading), data=_json_in_html(data))
    return Page(text)


def fill_template(package: str, name: str, **fields: str) -> str:
    """The template `name` of a package, with each {{field}} replaced by its value. Values are not escaped.

    Replaced text is not searched again, so a value may hold braces.
    """
    template = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def _pack(shape: Shape, number: int, view: View | tuple[float, float] | None) -> dict[str, Any]:
    """A shape as viewer.html reads it: numbers, text, and little-endian arrays in base 64."""
    shown = shown_points(shape.surface)
    if not len(shown):
        shown = np.zeros((1, 3))
    direction = view_for(shown, view)
    low, high = shown.min(axis=0), shown.max(axis=0)
    center = (low + high) / 2
    reach = np.concatenate([shown, *(arrows.verts for arrows in shape.arrows.values())])
    sides = any(field.at == "edges" for field in shape.fields)
    return {
        "title": shape.title or f"Shape {number + 1}",
        "up": direction.up,
        "azimuth": direction.azimuth,
        "elevation": direction.elevation,
        "radius": float(np.linalg.norm(reach - center, axis=1).max()) or 1.0,
        "ball": 0.55 * float(np.sqrt(np.prod(np.sort(high - low)[1:]) / len(shown))),
        **_pack_surface(shape.surface, center),
        "elements": _base64(face_elements(shape.surface.faces, "edges").astype("<u4")) if sides else "",
        "arrows": {name: _pack_surface(arrows, center) for name, arrows in shape.arrows.items()},
        "sets": [_pack_field(field) for field in shape.fields],
    }


def _pack_surface(surface: Surface, center: NDArray[np.float64]) -> dict[str, Any]:
    verts, faces = surface[:2]
    finite = np.isfinite(verts[faces]).all(axis=(1, 2))
    normals = np.zeros((len(faces), 3, 3))
    normals[finite] = corner_normals(verts, faces[finite])
    index: type[np.uint16 | np.uint32] = np.uint16 if len(verts) <= 0xFFFF else np.uint32
    return {
        "positions": _base64((verts - center).astype("<f4")),
        "faces": _base64(faces.astype(index)),
        "wideIndices": index is np.uint32,
        "normals": _base64((normals * 127).round().astype(np.int8)),
    }


def _pack_field(field: Field) -> dict[str, Any]:
    """A field with its values: int32 labels, float32 scalars, or colors as int32 numbers 0xRRGGBB."""
    values = field.values
    if field.kind == "colors":
        values = values.astype(np.int64) @ np.array([65536, 256, 1])
    kind = "<f4" if field.kind == "scalars" else "<i4"
    with np.errstate(over="ignore"):  # scalars beyond single precision become infinite
        return {"name": field.name, "kind": field.kind, "at": field.at, "values": _base64(values.astype(kind))}


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _json_in_html(data: Any) -> str:
    """JSON that is safe inside HTML: no string in it can end the script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
