"""Pictures of surfaces and their values, with legends. Pillow draws text, and is loaded faster than Matplotlib."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from diffnet.geometry.files import write_atomically
from diffnet.geometry.processes import available_cores
from diffnet.viz.fields import MISSING_COLOR, Field
from diffnet.viz.palette import ColorMap, Scale, colorize, ticks
from diffnet.viz.render import BACKGROUND, draw, paint, paint_scalars, png_bytes
from diffnet.viz.shapes import Meshes, Shape, make_shapes, scales_of
from diffnet.viz.surface import ValuesAt, View

_MAX_COLUMNS = 4
_INK, _FAINT, _LINE = (29, 33, 38), (92, 101, 110), (150, 156, 163)


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
    values = {"labels": labels, "scalars": scalars, "colors": colors, "vectors": vectors, "frames": frames}
    shapes = make_shapes(mesh, at, titles, **values)
    for shape in shapes:
        if len(shape.fields) > 1:
            names = ", ".join(field.name for field in shape.fields)
            raise ValueError(f"a picture shows one field of each shape, got {names}. `page` switches between several")
    scales = scales_of(shapes, color_map, range)

    def panel(shape: Shape) -> NDArray[np.uint8]:
        field = shape.fields[0]
        blend = field.at == "vertices" and field.kind != "labels"
        arrows = shape.arrows.get(field.name, shape.arrows.get(""))
        drawing = draw(shape.surface, field.at, size, view, arrows=arrows, blend=blend)
        if field.name in scales:
            scale = scales[field.name]
            return paint_scalars(drawing, scale.shares(field.values), scale.table)
        return paint(drawing, colorize(field.values) if field.kind == "labels" else field.values)

    # NumPy works without Python's global lock, so threads draw on all cores.
    with ThreadPoolExecutor(min(available_cores(), len(shapes))) as pool:
        panels = list(pool.map(panel, shapes))
    fields = [shape.fields[0] for shape in shapes]
    legends = _legends(fields, scales, label_names) if legend else []
    return Picture(_compose(panels, [shape.title for shape in shapes], legends, size))


def _legends(fields: Sequence[Field], scales: dict[str, Scale], label_names: Sequence[str]) -> list[Legend]:
    """One legend for all labels, and one for the scalars of each name. Default names are not shown."""
    legends = []
    of_labels = [field for field in fields if field.kind == "labels"]
    if of_labels:
        labels = np.concatenate([field.values for field in of_labels])
        heading = of_labels[0].name if {field.name for field in of_labels} != {"labels"} else ""
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
        pen.text((middle, top + 0.7 * text), title, fill=_INK, font=letters)
        image.paste(Image.fromarray(panel), (left, top + strip))
    left = columns * width
    for side in sides:
        image.paste(side, (left, strip))
        left += side.width
    return np.asarray(image)


class Legend(NamedTuple):
    """The meaning of colors.

    heading: text above, or ""
    entries: names with their colors
    scale: of a color bar, or None
    """

    heading: str
    entries: Sequence[tuple[str, Any]]
    scale: Scale | None = None


def label_legend(heading: str, labels: Any, names: Sequence[str]) -> Legend:
    """The legend of the labels that occur. A label without a name is shown as its number, negative ones come last."""
    occur = np.unique(labels)
    shown = occur[occur >= 0]
    texts = [str(names[c]) if c < len(names) else str(c) for c in shown.tolist()]
    entries = list(zip(texts, colorize(shown), strict=True))
    return Legend(heading, entries + [("unlabeled", MISSING_COLOR)] * bool((occur < 0).any()))


@cache
def font(size: int) -> Any:
    """DejaVu Sans from Matplotlib's files, which has Greek letters and symbols. Without it, Pillow's own font."""
    package = importlib.util.find_spec("matplotlib")  # this doesn't import it
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "mpl-data/fonts/ttf/DejaVuSans.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def one_line_each(texts: Sequence[str], letters: Any, width: float) -> list[str]:
    """The texts, each on one line of some width, see `short_names`."""
    return short_names([" ".join(text.split()) for text in texts], lambda text: letters.getlength(text) <= width)


def legend_image(legend: Legend, height: int, size: int, background: tuple[int, int, int]) -> Image.Image:
    """A legend as a picture of some height. Its width follows from the text, at most 18 times the size of the text."""
    letters, row, pad = font(size), round(1.7 * size), round(0.9 * size)
    most = 16 * size
    (heading,) = one_line_each([legend.heading], letters, most)
    top = pad + (row + pad // 2 if heading else 0)
    entries = list(legend.entries)
    marks = ticks(legend.scale.low, legend.scale.high) if legend.scale else []
    room = max((height - top - pad) // row, 1)
    if not legend.scale and len(entries) > room:
        hidden = len(entries) - room + 1
        entries = [*entries[: room - 1], (f"and {hidden} more", None)]
    names = one_line_each([name for name, _ in entries], letters, most - 2 * size)
    entries = [(name, color) for name, (_, color) in zip(names, entries, strict=True)]
    texts = [(heading, 0), *((name, 1.7 * size) for name, _ in entries), *((text, 2.2 * size) for _, text in marks)]
    width = round(max(letters.getlength(text) + left for text, left in texts)) + pad + size // 2
    image = Image.new("RGB", (width, height), background)
    draw = ImageDraw.Draw(image)
    draw.text((0, pad), heading, fill=_FAINT, font=letters)
    if legend.scale:
        room_below = pad + (row + pad) * len(entries)
        bar = max(min(height - top - size // 2 - room_below, 22 * size), 2 * size)
        # The color bar, with numbers on its right.
        top, right = top + size // 2, round(1.2 * size)
        rows = np.linspace(len(legend.scale.table) - 1, 0, bar).round().astype(int)
        image.paste(Image.fromarray(np.repeat(legend.scale.table[rows][:, None], right, axis=1)), (0, top))
        draw.rectangle((0, top, right - 1, top + bar - 1), outline=_LINE)
        for number, text in marks:
            y = top + (bar - 1) * (1 - (number - legend.scale.low) / (legend.scale.high - legend.scale.low))
            draw.line((right, y, right + 0.4 * size, y), fill=_LINE)
            draw.text((right + 0.8 * size, y), text, fill=_INK, font=letters, anchor="lm")
        top += bar + pad
    for name, color in entries:
        if color is not None:
            box = (0, top + 0.25 * size, size, top + 1.25 * size)
            draw.rectangle(box, fill=tuple(int(c) for c in color), outline=_LINE)
        draw.text((1.7 * size, top + 0.75 * size), name, fill=_INK, font=letters, anchor="lm")
        top += row
    return image


def short_names(names: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Names that fit. Dots stand for what is cut.

    fits: whether there is room for a text. It should hold for a part of each text for which it holds.

    A long name loses its middle, because names often differ at the end. Where names would then look the same, they show
    the part from their first difference on.

    >>> short_names(["upper jaw, left molar", "upper jaw, left incisor", "gum"], lambda text: len(text) <= 12)
    ['upper… molar', 'upper…ncisor', 'gum']
    """
    short = [name if fits(name) else _without_middle(name, fits) for name in names]
    for text in set(short):
        alike = [name for name, other in zip(names, short, strict=True) if other == text]
        if len(set(alike)) > 1:
            start = next(i for i, letters in enumerate(zip_longest(*alike)) if len(set(letters)) > 1)
            pairs = zip(names, short, strict=True)
            short = [_from(name, start, fits) if other == text else other for name, other in pairs]
    return short


def _without_middle(name: str, fits: Callable[[str], bool]) -> str:
    for length in range(len(name) - 1, 0, -1):
        text = name[: length // 2] + "…" + name[len(name) - (length - length // 2) :]
        if fits(text):
            return text
    return "…"


def _from(name: str, start: int, fits: Callable[[str], bool]) -> str:
    """The part of a name around its character number `start`, with as much before it as fits beside the rest."""
    end = len(name)
    while end > start + 1 and not fits(_part(name, start, end)):
        end -= 1
    while start > 0 and fits(_part(name, start - 1, end)):
        start -= 1
    return _part(name, start, end)


def _part(name: str, start: int, end: int) -> str:
    return "…" * (start > 0) + name[start:end] + "…" * (end < len(name))
