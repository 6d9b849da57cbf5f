"""Pictures of surfaces and their values."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from diffnet.geometry.files import write_atomically
from diffnet.geometry.processes import available_cores
from diffnet.viz.fields import MISSING_COLOR, Field
from diffnet.viz.legend import INK, Legend, font, label_legend, legend_image, one_line_each
from diffnet.viz.palette import ColorMap, Scale, colorize
from diffnet.viz.render import BACKGROUND, draw, paint, paint_scalars, png_bytes
from diffnet.viz.shapes import Meshes, Shape, make_shapes, scales_of
from diffnet.viz.surface import ValuesAt, View

_MAX_COLUMNS = 4


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A picture. Notebooks show it.

    pixels: (H, W, 3) uint8
    """

    pixels: NDArray[np.uint8]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file in the format of its extension, such as .png, .jpg or .webp.

        Raises ValueError for an unknown extension, and OSError if the file can't be written.
        """
        suffix = Path(path).suffix.lower()
        formats = Image.registered_extensions()
        if formats.get(suffix) not in Image.SAVE:
            raise ValueError(f"{path}: unknown format {suffix!r}, expected .png, .jpg or .webp, for example")
        out = io.BytesIO()
        Image.fromarray(self.pixels).save(out, format=formats[suffix])
        write_atomically(path, out.getvalue())

    def _repr_png_(self) -> bytes:
        return png_bytes(self.pixels)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.pixels, dtype) if copy or dtype is not None else self.pixels

    def __repr__(self) -> str:
        height, width, _ = self.pixels.shape
        return f"Picture({width} × {height} pixels)"


def picture(
    mesh: Meshes,
    *,
    labels: Any = None,
    scalars: Any = None,
    colors: Any = None,
    vectors: Any = None,
    frames: Any = None,
    at: ValuesAt | None = None,
    label_names: Sequence[str] = (),
    color_map: ColorMap = "viridis",
    range: tuple[float, float] | None = None,
    legend: bool = True,
    titles: str | Sequence[str] | None = None,
    size: tuple[int, int] = (600, 600),
    view: View | tuple[float, float] | None = None,
) -> Picture:
    """Draw a mesh or a point cloud, colored by labels, scalars or colors, with arrows for vectors.

    mesh: what `load_mesh` accepts, or a list of these, which are drawn side by side, four in a row. For a list, each
        of the arguments `labels` to `frames` is a list, too; its entries may be None.
    labels: (N,) integers; negative ones are unlabeled and gray
    scalars: (N,) real numbers; NaN is gray. `{"height (m)": values}` gives the legend a heading.
    colors: (N, 3) integers from 0 to 255 or floats from 0 to 1; NaN is gray
    vectors: (V, 3) or (F, 3), or tangent vectors (V, 2) in `frames`; see `vector_arrows`
    frames: (V, 3, 3), the frames of tangent vectors, or the `Operators` of the mesh
    at: the elements that the values belong to: "vertices", "faces" or "edges" (in the order of `mesh_edges`). Default:
        those whose number is N, in this order.
    label_names: the names of the labels 0, 1, … in the legend; a label without a name is shown as its number
    color_map: "viridis", "coolwarm" (for scalars with signs), "twilight" (for angles), the name of another colormap of
        Matplotlib, or a function, see `make_scale`
    range: the scalars at the ends of the color map. Default: the least and the largest finite one of all shapes. For
        "coolwarm", 0 is in the middle.
    legend: whether to draw one on the right
    titles: the title of each shape
    size: width and height of each shape's picture in pixels, without legend and titles
    view: azimuth and elevation in degrees, or a `View`. Default: the side where the shape is widest, see `default_view`

    Arrays may be NumPy arrays, tensors on any device, or lists. Scalars and colors at vertices are blended over the
    triangles. Labels are never blended: each point has the label of its nearest corner or side.

    Raises ValueError for arguments that do not fit, and MeshError for a mesh that can't be used.

    >>> picture(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), scalars=[0.0, 0.5, 1.0], size=(90, 60), legend=False)
    Picture(90 × 60 pixels)
    """
    shapes = make_shapes(
        mesh, labels=labels, scalars=scalars, colors=colors, vectors=vectors, frames=frames, at=at, titles=titles
    )
    for shape in shapes:
        if len(shape.fields) > 1:
            names = ", ".join(field.name for field in shape.fields)
            raise ValueError(f"a picture shows one field of each shape, got {names}. `page` switches between several")
    scales = scales_of(shapes, color_map, range)

    def panel(shape: Shape) -> NDArray[np.uint8]:
        return _panel(shape, scales.get(shape.fields[0].name), size, view)

    # NumPy works without Python's global lock, so threads draw on all cores.
    with ThreadPoolExecutor(min(available_cores(), len(shapes))) as pool:
        panels = list(pool.map(panel, shapes))
    fields = [shape.fields[0] for shape in shapes]
    legends = _legends(fields, scales, label_names) if legend else []
    return Picture(_compose(panels, [shape.title for shape in shapes], legends, size))


def _panel(
    shape: Shape, scale: Scale | None, size: tuple[int, int], view: View | tuple[float, float] | None
) -> NDArray[np.uint8]:
    field = shape.fields[0]
    blend = field.at == "vertices" and field.kind != "labels"
    drawing = draw(shape.surface, field.at, size, view, arrows=shape.arrows_beside(field), blend=blend)
    if scale is not None:
        return paint_scalars(drawing, scale.shares(field.values), scale.table)
    return paint(drawing, colorize(field.values) if field.kind == "labels" else field.values)


def _legends(fields: Sequence[Field], scales: dict[str, Scale], label_names: Sequence[str]) -> list[Legend]:
    """One legend for all labels, and one for the scalars of each name. Default names are not shown."""
    legends = []
    found = [field for field in fields if field.kind == "labels"]
    if found:
        labels = np.concatenate([field.values for field in found])
        heading = found[0].name if {field.name for field in found} != {"labels"} else ""
        legends.append(label_legend(heading, labels, label_names))
    for name, scale in scales.items():
        missing = any(np.isnan(field.values).any() for field in fields if field.name == name)
        entries = [("no value", MISSING_COLOR)] if missing else []
        legends.append(Legend(name if name != "scalars" else "", entries, scale))
    return legends


def _compose(
    panels: Sequence[NDArray[np.uint8]], titles: Sequence[str], legends: Sequence[Legend], size: tuple[int, int]
) -> NDArray[np.uint8]:
    """Put pictures in rows, with titles above and legends on the right."""
    (width, height), text = size, int(np.clip(round(min(size) / 38), 10, 32))
    columns = min(len(panels), _MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    strip = round(2.2 * text) if any(titles) else 0
    whole = rows * (strip + height)
    sides = [legend_image(legend, whole - strip, text, BACKGROUND) for legend in legends]
    image = Image.new("RGB", (columns * width + sum(side.width for side in sides), whole), BACKGROUND)
    letters, pen = font(text), ImageDraw.Draw(image)
    titles = one_line_each(titles, letters, width - text)
    for i, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        left, top = i % columns * width, i // columns * (strip + height)
        middle = left + (width - letters.getlength(title)) / 2
        pen.text((middle, top + 0.7 * text), title, fill=INK, font=letters)
        image.paste(Image.fromarray(panel), (left, top + strip))
    left = columns * width
    for side in sides:
        image.paste(side, (left, strip))
        left += side.width
    return np.asarray(image)
