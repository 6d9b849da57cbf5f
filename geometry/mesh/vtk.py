"""Reader of VTK files: legacy .vtk, and XML .vtp and .vtu.

VTK crashes, or never ends, on some damaged files, and it prints its errors. So a short-lived process with limits reads
the file from its standard input: it runs `main`. It answers on its standard output with a line "mesh" and an archive of
arrays, or with a line "refused" and a message.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
Content: TypeAlias = dict[str, NDArray[Any]]

# Numbers of VTK's cell types.
_SKIPPED = (0, 1, 2, 3, 4)  # empty cells, vertices and lines
_STRIP, _PIXEL = 6, 8
_POLYGONS = (5, 7, _PIXEL, 9)  # triangles, polygons, pixels and quadrilaterals

_LEGACY_KIND = re.compile(rb"\s(?:ascii|binary)\s+dataset\s+(?P<kind>\w+)", re.IGNORECASE)
_LEGACY_ASCII = re.compile(rb"\sascii\s+dataset\s", re.IGNORECASE)
_LEGACY_CELLS = re.compile(rb"^\s*cells\s+[1-9]", re.IGNORECASE | re.MULTILINE)
_XML_KIND = re.compile(rb"<VTKFile\b[^>]*?\btype\s*=\s*[\"'](?P<kind>\w+)")
_DAMAGED = "not a VTK file, or a damaged one"
_READERS = {  # by the kind of data that a file declares, in legacy files and in XML files
    "polydata": ("vtkIOLegacy", "vtkPolyDataReader"),
    "unstructured_grid": ("vtkIOLegacy", "vtkUnstructuredGridReader"),
    "PolyData": ("vtkIOXML", "vtkXMLPolyDataReader"),
    "UnstructuredGrid": ("vtkIOXML", "vtkXMLUnstructuredGridReader"),
}

# The paths are those of this process, so the same packages are found.
_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from diffnet.geometry.mesh.vtk import main; main()"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VTK_SMP_MAX_THREADS": "1"}


def read_vtk(data: bytes) -> tuple[NDArray[np.float64], Indices, Indices]:
    """Vertices (V, 3), the number of corners of each polygon (P,), and the vertex indices of all corners.

    Each triangle of a strip is a polygon. Vertex cells and lines are skipped. Raises ValueError if the package vtk is
    missing, for a damaged file, and for other kinds of data and cells.
    """
    arrays = _arrays(data)
    return arrays["verts"], arrays["sizes"], arrays["corners"]


def read_vtk_arrays(data: bytes) -> tuple[Content, Content]:
    """The arrays of numbers at the vertices, (V,) or (V, C), and at the polygons, by name. See `read_vtk`."""
    arrays = _arrays(data)
    vertices, polygons = (
        {name[len(at) :]: arrays[name] for name in arrays if name.startswith(at)} for at in ("vertex ", "polygon ")
    )
    return vertices, polygons


def _arrays(data: bytes) -> Any:
    """What the process answers: arrays by name, which are read when they are asked for."""
    if len(data) >= 2**31:
        raise ValueError(f"{len(data)} bytes are more than VTK reads from memory (2 GiB). Save the mesh as binary PLY")
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *sys.path], input=data, capture_output=True, env=os.environ | _ONE_THREAD
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ValueError(
            "VTK does not finish reading it. It may be damaged; save it again"
            if name == "SIGXCPU"
            else f"VTK crashes on it ({name}). It is damaged, or needs too much memory; save it again"
        )
    kind, _, content = done.stdout.partition(b"\n")
    if kind == b"refused":
        raise ValueError(content.decode())
    if kind != b"mesh":
        raise RuntimeError(f"the process that reads VTK files failed: {done.stderr.decode(errors='replace')}")
    return np.load(io.BytesIO(content), allow_pickle=False)


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to the answer
    data = sys.stdin.buffer.read()
    _limit(len(data))
    try:
        arrays = _read(data)
    except ImportError as e:
        _refuse(out, f"VTK files need the package vtk ({e}). Install it with: pip install 'diffnet[vtk]'")
    except MemoryError:
        _refuse(out, "it needs more memory than a file of its size should. It may be damaged")
    except ValueError as e:
        _refuse(out, str(e))
    else:
        answer = io.BytesIO()  # NumPy doesn't write files to a pipe
        np.savez(answer, **arrays)  # type: ignore[arg-type]  # of the further arguments
        out.write(b"mesh\n")
        out.write(answer.getbuffer())
    out.flush()
    os._exit(0)  # the arrays are written, so a failure when VTK is unloaded doesn't matter


def _refuse(out: Any, message: str) -> None:
    out.write(b"refused\n" + " ".join(message.split()).encode())


def _limit(size: int) -> None:
    """Limit memory and processor time. A damaged header can ask for any amount. Windows has no such limits."""
    if sys.platform == "win32":
        return
    import resource

    memory, seconds = 4 * 2**30 + 64 * size, 20 + size // 10**6
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        if limit == resource.RLIMIT_AS and sys.platform == "darwin":
            continue  # macOS refuses it
        _, hard = resource.getrlimit(limit)
        if hard == resource.RLIM_INFINITY or value < hard:
            resource.setrlimit(limit, (value, hard))


def _read(data: bytes) -> Content:
    module, name = _READERS[_kind(data)]
    from vtkmodules.vtkCommonCore import vtkOutputWindow, vtkStringOutputWindow

    if module == "vtkIOLegacy" and _LEGACY_ASCII.search(data[:4096]):
        data += b"\n"  # if the last number is at the very end, VTK doesn't notice that others are missing
    reader = getattr(importlib.import_module(f"vtkmodules.{module}"), name)()
    errors: list[str] = []

    def note(window: Any, event: str, text: str | None) -> None:  # None if it isn't UTF-8
        if event == "ErrorEvent" or "Error reading" in (text or ""):  # missing binary data is only a warning
            errors.append(text or "")

    note.CallDataType = "string0"  # type: ignore[attr-defined]  # how VTK passes the text
    window = vtkStringOutputWindow()
    for event in ("ErrorEvent", "WarningEvent"):
        window.AddObserver(event, note)
    vtkOutputWindow.SetInstance(window)
    reader.ReadFromInputStringOn()
    if module == "vtkIOLegacy":
        reader.SetBinaryInputString(data, len(data))  # SetInputString would end at the first zero byte
        for kind in ("Scalars", "Vectors", "Normals", "Tensors", "ColorScalars", "TCoords", "Fields"):
            getattr(reader, f"ReadAll{kind}On")()  # by default, the first of each
    else:
        reader.SetInputString(data)
    reader.Update()
    if errors:
        # "ERROR: In FILE, line N\nCLASS (ADDRESS): TEXT"
        text = re.sub(r"^(ERROR|Generic Warning): In .*\n|\w+ \(0x\w+\): |for file: *$", "", errors[0].strip()).strip()
        raise ValueError(f"{_DAMAGED} ({text})" if text else _DAMAGED)
    if name == "vtkUnstructuredGridReader" and _LEGACY_CELLS.search(data) and b"CELL_TYPES" not in data.upper():
        raise ValueError(f"{_DAMAGED}: it has CELLS without CELL_TYPES")  # VTK skips these cells
    return _content(reader.GetOutput())


def _kind(data: bytes) -> str:
    """The kind of data that the file declares, a key of _READERS."""
    legacy = data.lower().startswith(b"# vtk datafile")
    match = (_LEGACY_KIND if legacy else _XML_KIND).search(data[:4096])
    if match is None:
        raise ValueError(f"{_DAMAGED}: the header should begin with '# vtk DataFile' or <VTKFile")
    declared = match["kind"].decode(errors="replace")
    kind = declared.lower() if legacy else declared
    if kind not in _READERS:
        expected = "POLYDATA or UNSTRUCTURED_GRID" if legacy else "PolyData or UnstructuredGrid"
        raise ValueError(
            f"it holds {declared[:40]}, expected {expected}. Extract the surface, for example with ParaView, and save "
            "it"
        )
    return kind


def _content(data: Any) -> Content:
    from vtkmodules.util.numpy_support import vtk_to_numpy

    points = data.GetPoints()
    verts = np.zeros((0, 3)) if points is None else vtk_to_numpy(points.GetData()).astype(np.float64)
    if data.IsA("vtkPolyData"):
        sizes, corners = _cells(data.GetPolys())
        strip_sizes, strip_corners = _cells(data.GetStrips())
        types = np.repeat([7, _STRIP], [len(sizes), len(strip_sizes)])
        sizes, corners = np.concatenate([sizes, strip_sizes]), np.concatenate([corners, strip_corners])
        only_lines = len(types) == 0 and data.GetNumberOfLines() > 0
    else:
        sizes, corners = _cells(data.GetCells())
        types = np.zeros(0, np.int64)
        if len(sizes):
            types = np.array([data.GetCellType(i) for i in range(len(sizes))], np.int64)
        _check_types(types)
        only_lines = len(types) > 0 and bool(np.isin(types, (3, 4)).any() and (types <= 4).all())
    if only_lines:
        raise ValueError("its cells are lines, expected polygons. For a point cloud, save the points without cells")
    polygon_sizes, polygon_corners = _polygons(types, sizes, corners)
    counts, ends = (~np.isin(types, _SKIPPED)).astype(np.int64), np.cumsum(sizes)
    for i in np.flatnonzero(types == _STRIP):
        counts[i] = len(_polygons(types[i : i + 1], sizes[i : i + 1], corners[ends[i] - sizes[i] : ends[i]])[0])
    first = data.GetNumberOfVerts() + data.GetNumberOfLines() if data.IsA("vtkPolyData") else 0
    cells = np.repeat(np.arange(len(types)) + first, counts)
    arrays = _numbers("vertex", data.GetPointData(), np.arange(len(verts)))
    arrays |= _numbers("polygon", data.GetCellData(), cells)
    return {"verts": verts, "sizes": polygon_sizes, "corners": polygon_corners, **arrays}


def _numbers(at: str, attributes: Any, rows: Indices) -> Content:
    """Rows of the arrays of numbers. An array that lacks some is left out."""
    from vtkmodules.util.numpy_support import vtk_to_numpy

    columns = {}
    for i in range(attributes.GetNumberOfArrays()):
        array = attributes.GetArray(i)  # None for text
        if array is not None and array.GetNumberOfTuples() > rows.max(initial=-1):
            columns[f"{at} {array.GetName() or i}"] = vtk_to_numpy(array)[rows]
    return columns


def _cells(cells: Any) -> tuple[Indices, Indices]:
    """The number of corners of each cell, and the corners of all cells."""
    from vtkmodules.util.numpy_support import vtk_to_numpy

    if cells is None or cells.GetNumberOfCells() == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    cells.ConvertTo64BitStorage()
    offsets, corners = (
        vtk_to_numpy(array).astype(np.int64) for array in (cells.GetOffsetsArray(), cells.GetConnectivityArray())
    )
    sizes = np.diff(offsets)
    if offsets[0] != 0 or (sizes < 0).any() or offsets[-1] != len(corners):
        raise ValueError(f"{_DAMAGED}: the cells have corners that the file doesn't hold")
    return sizes, corners


def _check_types(types: Indices) -> None:
    """Raise ValueError for cells that are no part of a surface."""
    from vtkmodules.vtkCommonDataModel import vtkGenericCell

    other = types[~np.isin(types, (*_SKIPPED, *_POLYGONS, _STRIP))]
    if not len(other):
        return
    cell = vtkGenericCell.InstantiateCell(int(other[0]))
    name = f"type {other[0]}" if cell is None else cell.GetClassName().removeprefix("vtk")
    raise ValueError(
        f"{len(other)} of its {len(types)} cells are not triangles, quadrilaterals, polygons or triangle strips, the "
        f"first is a {name}. Extract the surface, for example with ParaView's Extract Surface, and save it"
    )


def _polygons(types: Indices, sizes: Indices, corners: Indices) -> tuple[Indices, Indices]:
    """The polygons among cells, with each strip as its triangles."""
    if np.isin(types, (5, 7, 9)).all():
        return sizes, corners
    parts: list[Indices] = []
    for kind, cell in zip(types, np.split(corners, np.cumsum(sizes)[:-1]), strict=True):
        if kind == _STRIP:
            triangles = np.stack([cell[:-2], cell[1:-1], cell[2:]], axis=1)
            triangles[1::2] = triangles[1::2, ::-1]  # every second triangle of a strip is turned the other way
            # A repeated corner links two parts of a strip. It is no triangle.
            parts += [t for t in triangles if len(set(t.tolist())) == 3]
        elif kind == _PIXEL:
            parts.append(cell[[0, 1, 3, 2]])
        elif kind not in _SKIPPED:
            parts.append(cell)
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return np.array([len(part) for part in parts], np.int64), joined
