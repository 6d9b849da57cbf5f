"""Cortical surfaces, and values at their vertices: files of GIFTI and of FreeSurfer, through the package nibabel."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

FREESURFER = (".pial", ".white", ".inflated", ".sphere")
GIFTI_VALUES = (".shape.gii", ".label.gii", ".func.gii")
UNASSIGNED = "???"  # the name of no label in label tables
OUTSIDE = ("unknown", "medial_wall", "medial wall")  # names of what is no cortex, in lower case
T = TypeVar("T")


class CortexValues(NamedTuple):
    """Values (V,) or (V, C) at the vertices.

    names: of the labels that the values (V,) int64 are indices of, −1 where there is none; or None for numbers
    colors: (C, 3), of these labels from 0 to 255
    """

    values: NDArray[Any]
    names: list[str] | None = None
    colors: NDArray[np.int64] | None = None


def read_gifti(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The vertices, and the sizes and the corners of the triangles, of a GIFTI surface. Raises ValueError."""
    image = _read(lambda: _nibabel().gifti.GiftiImage.from_bytes(data))
    points, triangles = (image.get_arrays_from_intent(f"NIFTI_INTENT_{kind}") for kind in ("POINTSET", "TRIANGLE"))
    if not points or not triangles:
        raise ValueError("it has no points or no triangles, so it is no surface")
    return _triangles(points[0].data, triangles[0].data)


def read_freesurfer(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The same of a surface of FreeSurfer, such as `lh.pial`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "surface")
        path.write_bytes(data)
        return _triangles(*_read(lambda: _nibabel().freesurfer.read_geometry(str(path))))


def is_cortical(path: Path) -> bool:
    """Whether a file holds values at the vertices of a cortex. Those of morphometry have any extension: `lh.sulc`."""
    name = path.name.lower()
    known = (".npy", ".txt", ".csv", ".json", ".gz", ".gii", *FREESURFER)
    is_morphometry = name.startswith(("lh.", "rh.")) and name.count(".") == 1 and not name.endswith(known)
    return name.endswith((".annot", ".label", *GIFTI_VALUES)) or is_morphometry


def value_files(folder: Path, stem: str, name: str) -> list[Path]:
    """The files that can hold the values NAME of the cortex STEM in a folder, whether they exist or not.

    FreeSurfer: `lh.NAME` beside the surface, and `label/lh.NAME.annot` and `.label` beside its folder
    GIFTI: `STEM_NAME.shape.gii`, also after the other words of STEM, as `sub-1_thickness` beside `sub-1_pial`
    """
    if stem in ("lh", "rh"):
        label = folder.parent / "label"
        ends = [place / f"{stem}.{name}{end}" for end in (".annot", ".label") for place in (label, folder)]
        return [folder / f"{stem}.{name}", *ends]
    words = dict.fromkeys([f"{stem}.", f"{stem}_", f"{stem.rpartition('_')[0]}_"])
    return [folder / f"{word}{name}{end}" for word in words for end in GIFTI_VALUES]


def read_values(path: Path) -> CortexValues:
    """The values in a file of `is_cortical`. Raises ValueError for another content."""
    if path.name.lower().endswith(".label"):
        raise ValueError("the file lists vertices, which can be a mask, and has no values")
    if path.name.lower().endswith(".annot"):
        return _annotation(*_read(lambda: _nibabel().freesurfer.read_annot(path, orig_ids=True)))
    if not path.name.lower().endswith(".gii"):
        return CortexValues(_read(lambda: _nibabel().freesurfer.read_morph_data(path)).astype(np.float64))
    image = _read(lambda: _nibabel().gifti.GiftiImage.from_filename(path))
    if not image.darrays:
        raise ValueError("it holds no values")
    columns = [np.asarray(each.data) for each in image.darrays]
    values = columns[0] if len(columns) == 1 else np.stack(columns, 1)
    labels = [label for label in image.labeltable.labels if label.label != UNASSIGNED]
    if not labels or values.ndim > 1:
        return CortexValues(values)
    places = np.full(values.shape, -1)
    for i, label in enumerate(labels):
        places[values == label.key] = i
    colors = np.array([[c or 0.0 for c in label.rgba[:3]] for label in labels])  # nibabel has None for no color
    return CortexValues(places, [label.label for label in labels], np.rint(255 * colors).astype(np.int64))


def _annotation(colors: NDArray[Any], table: NDArray[Any], names: Sequence[bytes]) -> CortexValues:
    """The regions of vertices with these packed colors (V,). Black is the color of vertices without a region.

    table: (C, 5), a row of red, green, blue, transparency and the packed color for each name
    """
    if len(table) != len(names):
        raise ValueError(f"its color table has {len(table)} rows and {len(names)} names")
    texts = [name.decode() for name in names]
    rows = [i for i, (name, color) in enumerate(zip(texts, table[:, 4], strict=True)) if color and name != UNASSIGNED]
    regions = np.full(len(colors), -1)
    for region, row in reversed(list(enumerate(rows))):  # the first of several rows of one color counts
        regions[colors == table[row, 4]] = region
    return CortexValues(regions, [texts[row] for row in rows], table[rows, :3].astype(np.int64))


def read_mask(path: Path, count: int) -> NDArray[Any]:
    """Which of the vertices (V,) are in a mask, from a file of `is_cortical`. Raises ValueError for another content.

    They are listed in a `.label` file, or have a label that isn't in OUTSIDE. Numbers stay as they are. count: V
    """
    if path.name.lower().endswith(".label"):
        listed = _read(lambda: _nibabel().freesurfer.read_label(path))
        if listed.max(initial=-1) >= count:
            raise ValueError(f"it lists vertex {listed.max()}, and the surface has {count} vertices")
        return np.isin(np.arange(count), listed)
    values, names, _ = read_values(path)
    if names is None:
        return values
    return np.array([*(name.lower() not in OUTSIDE for name in names), False])[values]


def values_bytes(
    suffix: str, values: NDArray[Any], names: Sequence[str] = (), colors: NDArray[np.uint8] | None = None
) -> bytes:
    """The content of a file with values (V,) or (V, C): `.annot`, `.label.gii` or `.shape.gii`.

    names, colors: (C,) and (C, 3), of the labels that the values are indices of, negative where there is none
    """
    gifti, table = _nibabel().gifti, np.zeros((len(names), 3), np.uint8) if colors is None else colors
    if suffix == ".annot":
        rows = np.column_stack([table, np.zeros((len(table), 2))]).astype(np.int64)
        rows[:, 4] = rows[:, :3] @ [1, 1 << 8, 1 << 16]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "labels.annot")
            _nibabel().freesurfer.write_annot(str(path), values, rows, list(names))
            return path.read_bytes()
    labels, kind, dtype = None, "SHAPE", "float32"
    if suffix == ".label.gii":
        labels, kind, dtype = gifti.GiftiLabelTable(), "LABEL", "int32"
        values = values + 1  # 0 is no label
        for key, (name, color) in enumerate(zip([UNASSIGNED, *names], [[0, 0, 0], *table.tolist()], strict=True)):
            label = gifti.GiftiLabel(key, *(c / 255 for c in color), 0.0 if key == 0 else 1.0)
            label.label = name
            labels.labels.append(label)
    columns = values.astype(dtype).reshape(len(values), -1).T
    arrays = [gifti.GiftiDataArray(np.ascontiguousarray(x), f"NIFTI_INTENT_{kind}") for x in columns]
    return bytes(gifti.GiftiImage(labeltable=labels, darrays=arrays).to_bytes())


def _triangles(points: Any, faces: Any) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    corners = np.asarray(faces, np.int64)
    return np.asarray(points, np.float64), np.full(len(corners), 3), corners.reshape(-1)


def _nibabel() -> Any:
    try:
        import nibabel
        import nibabel.freesurfer
    except ImportError as e:
        raise ValueError(f"files of cortices need the package nibabel ({e}): pip install 'diffnet[neuro]'") from e
    return nibabel


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as e:  # for damaged files, nibabel raises errors of its own, of expat, zlib and NumPy
        raise ValueError(f"nibabel can't read it: {e}") from e
