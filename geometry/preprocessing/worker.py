"""What a process does to fill the cache, one mesh after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from diffnet.geometry.mesh.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh
from diffnet.geometry.mesh.normalize import normalize_positions
from diffnet.geometry.preprocessing.entry import Options, Unsolved, found_or_computed, has_entry, unsolved_entry

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
HalfFilled: TypeAlias = str | tuple[Path, Unsolved] | None
Reader: TypeAlias = Callable[[MeshLike, str | os.PathLike[str] | None], Mesh]  # `load_mesh` or `normalized`


def normalized(source: MeshLike, cache_dir: str | os.PathLike[str] | None) -> Mesh:
    """A mesh at normalised positions. Raises MeshError for one that can't be used."""
    mesh = load_mesh(source, cache_dir)
    return replace(mesh, verts=normalize_positions(mesh.verts))


def fill_entry(
    source: MeshLike,
    read: Reader,
    options: Options,
    cache_dir: str | os.PathLike[str],
    device: torch.device | str = "cpu",
) -> str | None:
    """Make sure that the cache has the operators of the mesh that `read` makes of a source.

    Returns what is wrong with one that can't be used.
    """

    def fill() -> None:
        found_or_computed(read(source, cache_dir), options, cache_dir, device)

    return _attempted(fill, source)


def half_fill_entry(source: MeshLike, read: Reader, options: Options, cache_dir: str | os.PathLike[str]) -> HalfFilled:
    """The same, but for eigenpairs: returns where an entry is to be written that lacks these."""
    return _attempted(lambda: unsolved_entry(read(source, cache_dir), options, cache_dir), source)


def _attempted(work: Callable[[], T], source: MeshLike) -> T | str:
    try:
        return work()
    except MeshError as e:
        return str(e)
    except MemoryError:
        return f"{source_name(source)}: preprocessing it takes more memory than there is"


def is_filled(source: MeshLike, read: Reader, options: Options, cache_dir: str | os.PathLike[str]) -> bool:
    """Whether there is an entry; its content isn't looked at."""
    try:
        return has_entry(read(source, cache_dir), options, cache_dir)
    except MeshError:
        return False  # whoever fills the cache says what is wrong


def source_name(source: MeshLike) -> str:
    if isinstance(source, Mesh):
        return source.name
    return str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
