"""The rules of the repository that a parser can check: order of the rooms, circles, private names, kernels' names."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from rooms import ABOVE_ALL_ROOMS, ROOMS, ROOT, imports_of, modules, needs_triton, nodes, room_of, stubs, target

from diffnet.train.options.shared import TaskName


def files() -> Iterator[tuple[str, Path]]:
    """Every module and every stub file, with the module's name."""
    yield from modules().items()
    yield from stubs().items()


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def report(found: list[str]) -> str:
    return "\n".join(["", *found])


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_lower_ones(room: str) -> None:
    """In functions and in stub files, too. Only the stub of `diffnet` names all rooms, so that each can be reached."""
    package, allowed = ROOMS[room]
    rooms = {name for name, _ in ROOMS.values()}
    upward = []
    for module, path in files():
        if room_of(module) == package and module != ABOVE_ALL_ROOMS:
            for entry in imports_of(module, path):
                imported = target(entry)
                if imported.split(".")[0] != "diffnet" or (path == stubs()["diffnet"] and imported in rooms):
                    continue
                if imported == ABOVE_ALL_ROOMS or room_of(imported) not in {package, *allowed}:
                    upward.append(f"{place(path, entry.line)} imports {imported}")
    assert not upward, report(upward)


# The files and folders of a room, from top to bottom.
TOWERS = {
    "diffnet.train": (
        "cli commands export inference folds run set_parts preprocessing loop event_file run_checks epoch checkpoint "
        "evaluate run_folder ranks batches steps tasks orientation device place report "
        "correspondence resident metrics ranking validation fine_tuning options console"
    ),
}


@pytest.mark.parametrize("room", TOWERS)
def test_a_room_is_a_tower(room: str) -> None:
    """No file imports a higher one."""
    floors = {f"{room}.{name}": floor for floor, name in enumerate(TOWERS[room].split())}

    def floor_of(module: str) -> int | None:
        return next((floors[f] for f in floors if module == f or module.startswith(f"{f}.")), None)

    inside = {module: path for module, path in modules().items() if module.startswith(f"{room}.")}
    assert {floor_of(module) for module in inside} == set(floors.values())
    upward = [
        f"{place(path, entry.line)} imports {target(entry)}"
        for module, path in inside.items()
        for entry in imports_of(module, path)
        if (other := floor_of(target(entry))) is not None and other < floors[".".join(module.split(".")[:3])]
    ]
    assert not upward, report(upward)


def test_ops_need_torch_and_triton_only() -> None:
    """Functions may import SciPy when they need it, for its matrices and its k-d tree."""
    for module, path in modules().items():
        if room_of(module) == "diffnet.ops":
            for entry in imports_of(module, path):
                allowed = {"diffnet", "torch", "triton", *(() if entry.at_import_time else ("scipy",))}
                root = entry.module.split(".")[0]
                assert root in allowed | sys.stdlib_module_names, f"{place(path, entry.line)} imports {root}"


def test_imports_are_absolute() -> None:
    """A reader sees the room. Stub files are relative, because lazy_loader reads them."""
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, place(path, node.lineno)


def test_no_circles() -> None:
    """Imports in functions and for type checkers count, too."""
    graph = {
        module: {target(e) for e in imports_of(module, path)} & modules().keys() - {module}
        for module, path in modules().items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def is_private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def test_no_private_name_is_imported() -> None:
    found = [
        f"{place(path, e.line)} imports {e.name} from {e.module}"
        for module, path in files()
        for e in imports_of(module, path)
        if e.module.split(".")[0] == "diffnet"
        if is_private(e.name) or any(map(is_private, e.module.split(".")))
    ]
    assert not found, report(found)


@functools.cache
def private_definitions(path: Path) -> set[str]:
    """The private functions, classes, fields, variables and attributes that a file defines."""
    names = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


def test_no_private_name_is_used_in_another_file() -> None:
    """Neither `module._name` nor a private attribute of an object whose class stands in another file."""
    defined = {path: private_definitions(path) for path in modules().values()}
    found = []
    for module, path in modules().items():
        elsewhere = set().union(*(names for other, names in defined.items() if other != path)) - defined[path]
        imported = {e.alias for e in imports_of(module, path) if target(e).split(".")[0] == "diffnet"}
        uses = [
            node
            for node in nodes(path)
            if isinstance(node, ast.Attribute)
            if node.attr in elsewhere or (is_private(node.attr) and ast.unparse(node.value) in imported)
        ]
        found += sorted({f"{place(path, n.lineno)} uses {ast.unparse(n)}" for n in uses})
    assert not found, report(found)


def test_tests_say_why_they_use_private_names() -> None:
    """In each file, a comment on or above one use of each private name gives the reason."""
    defined = set().union(*(private_definitions(path) for path in modules().values()))
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if defined.isdisjoint(re.findall(r"\b_\w+", text)):
            continue  # parsing all files takes seconds
        lines = ["", *text.splitlines()]
        explained: dict[str, bool] = {}
        for line, name in sorted(private_uses(path, defined)):
            comment = "#" in lines[line] or lines[line - 1].lstrip().startswith("#")
            explained[name] = explained.get(name, False) or comment
        found += [f"{path.relative_to(ROOT)} uses {name}" for name, comment in explained.items() if not comment]
    assert not found, report(found)


def private_uses(path: Path, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every use of a private name of the package in a test, `monkeypatch.setattr` included."""
    foreign = defined - private_definitions(path)
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "diffnet":
            yield from ((alias.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and node.attr in foreign:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            strings = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, s) for s in strings if s.rpartition(".")[2] in foreign)


def test_triton_is_imported_by_modules_of_kernels_only() -> None:
    """Every other module loads where Triton is absent."""
    found = [
        f"{place(path, e.line)} imports {e.module}"
        for module, path in modules().items()
        if not needs_triton(module)
        for e in imports_of(module, path)
        if e.at_import_time and (e.module.split(".")[0] == "triton" or needs_triton(target(e)))
    ]
    assert not found, report(found)


def compared_values(path: Path) -> Iterator[ast.expr]:
    """The sides of comparisons, the patterns of `match`, and the keys of dictionaries."""
    for node in nodes(path):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.MatchValue):
            yield node.value
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)


def test_tasks_are_told_apart_in_their_folders_only() -> None:
    """The rest of `train` calls the methods of a `Task`, so a new task needs no change there."""
    names, kinds = get_args(TaskName), {"MeshTask", "PairedMeshes"}
    folders = "diffnet.train.tasks.", "diffnet.train.options"
    others = [p for m, p in modules().items() if room_of(m) == "diffnet.train" and not m.startswith(folders)]
    found = [
        f"{place(path, value.lineno)} compares with {leaf.value}"
        for path in others
        for value in compared_values(path)
        for leaf in ast.walk(value)
        if isinstance(leaf, ast.Constant) and leaf.value in names
    ]
    found += [
        f"{place(path, node.lineno)} names {node.id}"
        for path in others
        for node in nodes(path)
        if isinstance(node, ast.Name) and node.id in kinds
    ]
    assert not found, report(found)


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            yield node


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles the function."""
    return any(re.match(r"(triton|gluon)\.jit\b|jit\b", ast.unparse(d)) for d in function.decorator_list)


def launched(path: Path) -> set[str]:
    """The names in calls of the form `name[grid](…)`, which launch kernels."""
    calls = [node.func for node in nodes(path) if isinstance(node, ast.Call)]
    return {c.value.id for c in calls if isinstance(c, ast.Subscript) and isinstance(c.value, ast.Name)}


def test_names_of_kernels() -> None:
    """A kernel's name ends in `_kernel` and is unique, so that a profile names one place. Nothing else ends so."""
    compiled = [(f.name, path) for path in modules().values() for f in functions(path) if is_compiled(f)]
    launches = set().union(*(launched(path) for path in modules().values()))
    kernels = [(name, path) for name, path in compiled if name in launches or name.endswith("_kernel")]
    assert len(kernels) > 20
    counts = Counter(name for name, _ in kernels)
    found = [f"{path}: {name} does not end in _kernel" for name, path in kernels if not name.endswith("_kernel")]
    found += [f"{path}: {name} is not unique" for name, path in kernels if counts[name] > 1]
    for f, where in ((f, place(path, f.lineno)) for path in modules().values() for f in functions(path)):
        if f.name.endswith("_kernel"):
            found += [f"{where}: {f.name} is no kernel"] * (not is_compiled(f))
            if not {"launched", "guarded"} & {ast.unparse(d) for d in f.decorator_list}:
                found.append(
                    f"{where}: {f.name} is launched on the current GPU; decorate it with `launched` or `guarded`"
                )
    assert not found, report(found)
