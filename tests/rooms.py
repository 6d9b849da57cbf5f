"""The rooms of the checkout, their modules, and the imports of a module, found by parsing the source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# Each room's folder, its package, and the packages that it may import (section 1 of the design).
ROOMS: dict[str, tuple[str, set[str]]] = {
    "ops": ("diffnet.ops", set()),
    "geometry": ("diffnet.geometry", {"diffnet.ops"}),
    "viz": ("diffnet.viz", {"diffnet.geometry"}),
    "diffnet": ("diffnet", {"diffnet.ops", "diffnet.geometry"}),
    "data": ("diffnet.data", {"diffnet.geometry"}),
    "train": ("diffnet.train", {"diffnet.ops", "diffnet.geometry", "diffnet.viz", "diffnet", "diffnet.data"}),
    "benchmarks": (
        "diffnet.benchmarks",
        {"diffnet.ops", "diffnet.geometry", "diffnet.viz", "diffnet", "diffnet.data", "diffnet.train"},
    ),
}
# The command line joins all rooms, and no room imports it.
ABOVE_ALL_ROOMS = "diffnet.__main__"


class Import(NamedTuple):
    """`from module import name`, or `import module` where name is None."""

    module: str
    name: str | None
    alias: str
    line: int
    at_import_time: bool


def room_files(pattern: str) -> dict[str, Path]:
    """The files of all rooms that match a pattern, by module name. A package has the name of its folder."""
    found = {}
    for room, (package, _) in ROOMS.items():
        for path in sorted((ROOT / room).rglob(pattern)):
            parts = path.relative_to(ROOT / room).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by name, with its file."""
    return room_files("*.py")


@functools.cache
def stubs() -> dict[str, Path]:
    """Every stub file by the name of its module."""
    return room_files("*.pyi")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(parsed(path)))


@functools.cache
def imports_of(module: str, path: Path) -> tuple[Import, ...]:
    """All imports of a file, with absolute module names."""
    is_package = path.stem == "__init__"
    return tuple(_walk(parsed(path), module.split("."), is_package, at_import_time=path.suffix == ".py"))


def _walk(tree: ast.AST, here: list[str], is_package: bool, *, at_import_time: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, alias.asname or alias.name, node.lineno, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            kept = len(here) - node.level + is_package if node.level else 0
            base = ".".join([*here[:kept], *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(base, alias.name, alias.asname or alias.name, node.lineno, at_import_time)
        else:
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            )
            yield from _walk(node, here, is_package, at_import_time=at_import_time and not later)


def target(imported: Import) -> str:
    """The module that an import loads.

    `from diffnet.geometry import Operators` loads the module that geometry's stub names for `Operators`.
    """
    if imported.name is None:
        return imported.module
    full = f"{imported.module}.{imported.name}"
    if full in modules():
        return full
    if imported.module in stubs():
        for entry in imports_of(imported.module, stubs()[imported.module]):
            if entry.alias == imported.name:
                return target(entry)
    return imported.module


def room_of(module: str) -> str:
    """The package of the room that a module belongs to."""
    packages = {package for package, _ in ROOMS.values()}
    two = ".".join(module.split(".")[:2])
    return two if two in packages else "diffnet"


def needs_triton(module: str) -> bool:
    """Whether a module may import Triton when it is loaded: it holds kernels, or parts of kernels."""
    name = module.rpartition(".")[2]
    parts_of_kernels = {"diffnet.ops.common.matmul", "diffnet.ops.common.spans"}
    return name == "kernels" or name.endswith("_kernels") or module in parts_of_kernels
