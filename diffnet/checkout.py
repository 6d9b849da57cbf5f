"""The rooms of a checkout (`ops/`, `geometry/` …) as subpackages of `diffnet`.

In a wheel they lie inside the package. In a checkout they stand beside it. If the root of the checkout were a place of
subpackages like any other, the package would also contain itself, as `diffnet.diffnet`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType


class RoomFinder:
    """Finds the packages beside a package as its subpackages, and nothing else. See `importlib.abc.PathEntryFinder`."""

    def __init__(self, package: Path) -> None:
        self._files = FileFinder(str(package.parent), (SourceFileLoader, SOURCE_SUFFIXES))
        packages = {path.parent.name for path in package.parent.glob("*/__init__.py")}
        self._rooms = sorted(packages - {package.name})

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        return self._files.find_spec(name, target) if name.rpartition(".")[2] in self._rooms else None

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Called by `pkgutil.iter_modules`."""
        return ((prefix + room, True) for room in self._rooms)

    def invalidate_caches(self) -> None:
        self._files.invalidate_caches()


def rooms_beside(package: Path) -> str:
    """Return an entry for the `__path__` of a package, where Python finds the packages beside it."""
    # Another spelling of the folder, because the folder itself can be an entry of sys.path.
    entry = str(package / "..")

    def hook(path: str) -> RoomFinder:
        if path != entry:
            raise ImportError
        return RoomFinder(package)

    sys.path_hooks.insert(0, hook)
    return entry
