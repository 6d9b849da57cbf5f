"""Writes the built-in sets: labeled bodies and bodies in pairs, as folders of small files in `data/builtin`.

    python -m diffnet.benchmarks.bodies.pack BODIES MAPS [--out FOLDER]

BODIES is a set for `load_dataset` with labels at the faces, and MAPS one for `load_pairs` with template vertices.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffnet.data import BODIES, load_dataset, load_pairs
from diffnet.geometry import Mesh

STEPS = 2**13  # of the largest coordinate. Rounded numbers have few digits in base 2, so they compress well.


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bodies", type=Path)
    parser.add_argument("maps", type=Path)
    parser.add_argument("--out", type=Path, default=BODIES.parent)
    options = parser.parse_args(arguments)
    pack_bodies(options.bodies, options.out / "bodies")
    pack_maps(options.maps, options.out / "body_maps")
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {size / 1e6:.2f} MB")


def pack_bodies(source: Path, out: Path) -> None:
    """The set with the label of each face in the PLY file of its mesh."""
    data = load_dataset(source)
    for part, items in (("train", data.train), ("test", data.test)):
        for item in items:
            _write_ply(out / part / f"{item.name}.ply.gz", item.mesh, item.labels)
    (out / "label_names.txt").write_text("".join(f"{name}\n" for name in data.label_names))


def pack_maps(source: Path, out: Path) -> None:
    """The set with the vertex at each template point in a text file, counted from 1."""
    data = load_pairs(source)
    (out / "corres").mkdir(parents=True, exist_ok=True)
    for part, shapes in (("train", data.train), ("test", data.test)):
        for shape in shapes:
            assert isinstance(shape.template, np.ndarray)
            _write_ply(out / part / f"{shape.name}.ply.gz", shape.mesh)
            (out / "corres" / f"{shape.name}.vts").write_text("".join(f"{i + 1}\n" for i in shape.template))


def _write_ply(path: Path, mesh: Mesh, labels: NDArray[np.int64] | None = None) -> None:
    """A PLY file, compressed by gzip, with rounded coordinates, and the label of each face.

    The types of `viz.write_ply` are wider. With them, the sets exceed 1 MB.
    """
    step = 2.0 ** np.ceil(np.log2(np.abs(mesh.verts).max() / STEPS))
    corners: list[tuple[str, str, tuple[int, ...]]] = [("count", "u1", ()), ("corners", "<u2", (3,))]
    faces = np.zeros(len(mesh.faces), [*corners, *([] if labels is None else [("label", "u1", ())])])
    faces["count"], faces["corners"] = 3, mesh.faces
    if labels is not None:
        faces["label"] = labels
    header = [
        "ply",
        "format binary_little_endian 1.0",
        f"element vertex {len(mesh.verts)}",
        *(f"property float {axis}" for axis in "xyz"),
        f"element face {len(faces)}",
        "property list uchar ushort vertex_indices",
        *([] if labels is None else ["property uchar label"]),
        "end_header\n",
    ]
    content = "\n".join(header).encode() + (np.round(mesh.verts / step) * step).astype("<f4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content + faces.tobytes(), mtime=0))


if __name__ == "__main__":
    main()
