"""Reader of VTK files: legacy .vtk, and XML .vtp and .vtu.

VTK crashes, or never ends, on some damaged files, and it prints its errors. So a short-lived process with limits reads
the file; see `vtk_process.py`.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The paths are those of this process, so the same packages are found.
_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from diffnet.geometry.mesh.vtk_process import main; main()"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "VTK_SMP_MAX_THREADS": "1"}


def read_vtk(data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Vertices (V, 3), the number of corners of each polygon (P,), and the vertex indices of all corners.

    Each triangle of a strip is a polygon. Vertex cells and lines are skipped. Raises ValueError if the package vtk is
    missing, for a damaged file, and for other kinds of data and cells.
    """
    arrays = _arrays(data)
    return arrays["verts"], arrays["sizes"], arrays["corners"]


def read_vtk_arrays(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
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
