"""Reader and writer of VTK files through pyvista: legacy .vtk, and XML .vtp and .vtu.

VTK crashes, or never ends, on some damaged files, and it prints its errors. So a short-lived process with limits reads
the file: it runs `main`. It answers on its standard output with a line "mesh" and an archive of arrays, or with a line
"refused" and a message.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import IN_BRACKETS, OptionError, raised_as
from diffnet.geometry.files import npz_bytes
from diffnet.geometry.mesh.content import VTK_FORMATS

Indices: TypeAlias = NDArray[np.int64]
Content: TypeAlias = dict[str, NDArray[Any]]

MAX_ANSWERS = 2**28  # bytes of files that stay in memory once they are read
_answers: dict[bytes, bytes] = {}  # by the hash of the file

# Numbers of VTK's cell types.
_SKIPPED = (0, 1, 2, 3, 4)  # empty cells, vertices and lines
_STRIP, _PIXEL = 6, 8
_POLYGONS = (5, 7, _PIXEL, 9)  # triangles, polygons, pixels and quadrilaterals

_LEGACY_KIND = re.compile(rb"\s(?:ascii|binary)\s+dataset\s+(?P<kind>\w+)", re.IGNORECASE)
_LEGACY_ASCII = re.compile(rb"\sascii\s+dataset\s", re.IGNORECASE)
_LEGACY_CELLS = re.compile(rb"^\s*cells\s+[1-9]", re.IGNORECASE | re.MULTILINE)
_XML_KIND = re.compile(rb"<VTKFile\b[^>]*?\btype\s*=\s*[\"'](?P<kind>\w+)")
_MISSING = "VTK files need the package pyvista ({}). Install it with: pip install 'diffnet[pyvista]'"
_DAMAGED = "not a VTK file, or a damaged one"
# The extension by the kind of data that a file declares, in legacy files and in XML files.
_SUFFIXES = {"polydata": ".vtk", "unstructured_grid": ".vtk", "PolyData": ".vtp", "UnstructuredGrid": ".vtu"}

# The paths are those of this process, so the same packages are found.
_COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from diffnet.geometry.mesh.vtk import main; main(sys.argv[1])"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VTK_SMP_MAX_THREADS": "1"}


def read_vtk(data: bytes) -> tuple[NDArray[np.float64], Indices, Indices]:
    """Vertices (V, 3), the number of corners of each polygon (P,), and the vertex indices of all corners.

    Each triangle of a strip is a polygon. Vertex cells and lines are skipped. Raises ValueError if the package pyvista
    is missing, for a damaged file, and for other kinds of data and cells.
    """
    arrays = _arrays(data)
    return arrays["verts"], arrays["sizes"], arrays["corners"]


class VtkArrays(NamedTuple):
    """The arrays of numbers of a file by name: (V,) or (V, C), (P,) or (P, C), and of any shape."""

    vertices: Content
    polygons: Content
    fields: Content


def read_vtk_arrays(data: bytes) -> VtkArrays:
    """The arrays at the vertices, at the polygons and of the whole file. See `read_vtk`."""
    arrays = _arrays(data)
    places = "vertex ", "polygon ", "field "
    return VtkArrays(*({name[len(at) :]: arrays[name] for name in arrays if name.startswith(at)} for at in places))


def read_ahead(paths: Sequence[Path]) -> threading.Thread:
    """Begin to read the first of some files if it is one of VTK, so that the caller can import PyTorch meanwhile.

    Errors come when the mesh is read. Join the thread before.
    """

    def read() -> None:
        if paths and paths[0].suffix.lower() in VTK_FORMATS:
            with suppress(OSError, ValueError, RuntimeError):
                _answer(paths[0].read_bytes())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def vtp_bytes(verts: NDArray[np.float64], sizes: Indices, corners: Indices, arrays: VtkArrays) -> bytes:
    """The content of a .vtp file with polygons and arrays, see `read_vtk`. Fields may also be text."""
    try:
        import pyvista
        from vtkmodules.vtkIOXML import vtkXMLPolyDataWriter
    except ImportError as e:
        raise OptionError(_MISSING.format(e)) from e
    faces = np.insert(corners, np.cumsum(sizes) - sizes, sizes)  # each polygon behind its number of corners
    data = pyvista.PolyData(verts, faces=faces) if len(sizes) else pyvista.PolyData(verts)
    for place, table in zip((data.point_data, data.cell_data, data.field_data), arrays, strict=True):
        for name, values in table.items():
            if values.dtype.kind == "U":
                data.GetFieldData().AddArray(_text_array(name, values.tolist()))
            else:
                place[name] = values
    writer = vtkXMLPolyDataWriter()
    writer.SetInputDataObject(data)
    writer.SetDataModeToBinary()
    writer.SetCompressionLevel(1)  # takes half the time of the default, and files are 2 % larger
    writer.WriteToOutputStringOn()
    writer.Write()
    content: str = writer.GetOutputString()
    return content.encode()


def _text_array(name: str, texts: Sequence[str]) -> Any:
    """An array of VTK. pyvista makes those of ASCII alone."""
    from vtkmodules.vtkCommonCore import vtkStringArray

    array = vtkStringArray()
    array.SetName(name)
    for text in texts:
        array.InsertNextValue(text)
    return array


def _arrays(data: bytes) -> Any:
    """What the process answers: arrays by name, which are read when they are asked for."""
    return np.load(io.BytesIO(_answer(data)), allow_pickle=False)


def _answer(data: bytes) -> bytes:
    """The answer of the process. The last ones are kept, because a mesh and its arrays are asked for one by one."""
    key = hashlib.sha256(data).digest()
    answer = _answers.get(key)
    if answer is None:
        answer = _read_apart(data)
        while _answers and sum(map(len, [*_answers.values()])) + len(answer) > MAX_ANSWERS:
            _answers.pop(next(iter(_answers)), None)
        _answers[key] = answer
    return answer


def _read_apart(data: bytes) -> bytes:
    """What a new process answers for the content of a file. Raises ValueError if it refuses the file, or crashes."""
    suffix = _SUFFIXES[_kind(data)]
    if suffix == ".vtk" and _LEGACY_ASCII.search(data[:4096]):
        data += b"\n"  # if the last number is at the very end, VTK doesn't notice that others are missing
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"mesh{suffix}")
        file.write_bytes(data)
        command = [sys.executable, "-c", _COMMAND, str(file), *sys.path]
        # Ctrl-C ends a command at once while it imports. The process goes on, and removes the folder.
        done = subprocess.run(command, capture_output=True, env=os.environ | _ONE_THREAD, start_new_session=True)
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
    return content


def main(file: str) -> None:
    """Read a file that is alone in its folder, remove both, and answer on the standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write to the answer
    _limit(os.path.getsize(file))
    try:
        arrays = _read(file)
    except ImportError as e:
        _refuse(out, _MISSING.format(e))
    except MemoryError:
        _refuse(out, "it needs more memory than a file of its size should. It may be damaged")
    except ValueError as e:
        _refuse(out, str(e))
    else:
        out.write(b"mesh\n")
        out.write(npz_bytes(arrays))  # NumPy doesn't write files to a pipe
    finally:
        os.remove(file)
        os.rmdir(os.path.dirname(file))
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


def _read(file: str) -> Content:
    import pyvista

    damaged = raised_as(ValueError, _DAMAGED, pyvista.VTKExecutionError, form=IN_BRACKETS)
    with damaged, pyvista.VtkErrorCatcher(send_to_logging=False) as caught:
        data = pyvista.get_reader(file).read()
    errors = [event.alert for event in caught.error_events]
    errors += [event.alert for event in caught.warning_events if "Error reading" in event.alert]  # missing binary data
    if errors:
        raise ValueError(f"{_DAMAGED} ({errors[0]})")
    content = Path(file).read_bytes() if file.endswith(".vtk") else b""
    if _LEGACY_CELLS.search(content) and b"CELL_TYPES" not in content.upper():
        raise ValueError(f"{_DAMAGED}: it has CELLS without CELL_TYPES")  # VTK skips these cells
    return _content(data)


def _kind(data: bytes) -> str:
    """The kind of data that the file declares, a key of _SUFFIXES."""
    legacy = data.lower().startswith(b"# vtk datafile")
    match = (_LEGACY_KIND if legacy else _XML_KIND).search(data[:4096])
    if match is None:
        raise ValueError(f"{_DAMAGED}: the header should begin with '# vtk DataFile' or <VTKFile")
    declared = match["kind"].decode(errors="replace")
    kind = declared.lower() if legacy else declared
    if kind not in _SUFFIXES:
        expected = "POLYDATA or UNSTRUCTURED_GRID" if legacy else "PolyData or UnstructuredGrid"
        raise ValueError(
            f"it holds {declared[:40]}, expected {expected}. Extract the surface, for example with ParaView, and save "
            "it"
        )
    return kind


def _content(data: Any) -> Content:
    grid = data.cast_to_unstructured_grid()  # cells of all kinds in the order of their arrays
    types = np.asarray(grid.celltypes).astype(np.int64)
    sizes, corners = (np.asarray(x).astype(np.int64) for x in (np.diff(grid.cell_offsets), grid.cell_connectivity))
    _check_types(types)
    if np.isin(types, (3, 4)).any() and (types <= 4).all():
        raise ValueError("its cells are lines, expected polygons. For a point cloud, save the points without cells")
    polygon_sizes, polygon_corners, cells = _polygons(types, sizes, corners)
    verts = np.asarray(data.points).astype(np.float64)
    arrays = _numbers("vertex", data.point_data, np.arange(len(verts)))
    arrays |= _numbers("polygon", data.cell_data, cells)
    arrays |= _numbers("field", data.field_data)
    return {"verts": verts, "sizes": polygon_sizes, "corners": polygon_corners, **arrays}


def _numbers(at: str, arrays: Any, rows: Indices | None = None) -> Content:
    """The arrays of numbers, with these rows of each. An array that lacks some is left out.

    rows: None for whole arrays, also those of text
    """
    columns = {name: np.asarray(array) for name, array in arrays.items()}
    return {
        f"{at} {name}": column if rows is None else column[rows]
        for name, column in columns.items()
        if column.dtype.kind in ("biufU" if rows is None else "biuf")
        and (rows is None or len(column) > rows.max(initial=-1))
    }


def _check_types(types: Indices) -> None:
    """Raise ValueError for cells that are no part of a surface."""
    from pyvista import CellType

    other = types[~np.isin(types, (*_SKIPPED, *_POLYGONS, _STRIP))]
    if not len(other):
        return
    names = {each.value: each.name.replace("_", " ").lower() for each in CellType}
    name = names.get(int(other[0]), f"cell of type {other[0]}")
    raise ValueError(
        f"{len(other)} of its {len(types)} cells are not triangles, quadrilaterals, polygons or triangle strips, the "
        f"first is a {name}. Extract the surface, for example with ParaView's Extract Surface, and save it"
    )


def _polygons(types: Indices, sizes: Indices, corners: Indices) -> tuple[Indices, Indices, Indices]:
    """The sizes and the corners of the polygons among cells, with each strip as its triangles, and the cell of each."""
    counts = ~np.isin(types, _SKIPPED)
    cells, types, sizes, corners = np.flatnonzero(counts), types[counts], sizes[counts], corners[counts.repeat(sizes)]
    if np.isin(types, (5, 7, 9)).all():
        return sizes, corners, cells
    parts: list[Indices] = []
    ends: list[int] = []  # the number of polygons after each cell
    for kind, cell in zip(types, np.split(corners, np.cumsum(sizes)[:-1]), strict=True):
        if kind == _STRIP:
            triangles = np.stack([cell[:-2], cell[1:-1], cell[2:]], axis=1)
            triangles[1::2] = triangles[1::2, ::-1]  # every second triangle of a strip is turned the other way
            # A repeated corner links two parts of a strip. It is no triangle.
            parts += [t for t in triangles if len(set(t.tolist())) == 3]
        else:
            parts.append(cell[[0, 1, 3, 2]] if kind == _PIXEL else cell)
        ends.append(len(parts))
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return np.array([len(part) for part in parts], np.int64), joined, cells.repeat(np.diff(ends, prepend=0))
