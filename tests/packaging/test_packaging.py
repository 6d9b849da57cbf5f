"""The import namespace: one distribution, `diffnet`, whether in a checkout or installed, and the order of its rooms."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

# The room's folder, its package, and the packages of the rooms that it may import.
ROOMS: dict[str, tuple[str, set[str]]] = {
    "ops": ("diffnet.ops", set()),
    "geometry": ("diffnet.geometry", {"diffnet.ops"}),
    "diffnet": ("diffnet", {"diffnet.ops", "diffnet.geometry"}),
    "data": ("diffnet.data", {"diffnet.geometry"}),
    "train": ("diffnet.train", {"diffnet.ops", "diffnet.geometry", "diffnet", "diffnet.data"}),
    "benchmarks": (
        "diffnet.benchmarks",
        {"diffnet.ops", "diffnet.geometry", "diffnet", "diffnet.data", "diffnet.train"},
    ),
}
# Puts the command line together from all rooms, and is imported by none.
ABOVE_ALL_ROOMS = "diffnet.__main__"
SUBPACKAGES = [room for room in ROOMS if room != "diffnet"]

LOOK = f"""
import importlib, json, sys
from importlib.util import find_spec
names = ["diffnet", *(f"diffnet.{{room}}" for room in {SUBPACKAGES}), "diffnet.train.cli"]
files = {{name: importlib.import_module(name).__file__ for name in names}}
# what is on the path because of the current folder is not installed
bare = [name for name in {[*SUBPACKAGES, "tests"]} if find_spec(name)]
print(json.dumps([files, bare]))
"""


class Environment:
    """A throw-away virtual environment that sees the dependencies of the running one, and nothing else of it.

    .pth files are read in an environment's own site-packages only, so an editable install of the running environment
    doesn't reach into this one.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self.site = next(folder.glob("lib/python*/site-packages"))
        dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "dependencies.pth").write_text("\n".join(dependencies))

    def run(self, *command: str, cwd: Path, **variables: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env=env | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *what: str, cwd: Path) -> None:
        flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        self.run("python", "-m", "pip", "install", *flags, *what, cwd=cwd)

    def look(self, cwd: Path, **variables: str) -> tuple[dict[str, Path], list[str]]:
        """The files that the package and its subpackages come from, and the rooms found under a bare name."""
        files, bare = json.loads(self.run("python", "-c", LOOK, cwd=cwd, **variables))
        return {name: Path(file) for name, file in files.items()}, bare


def copy_tree(to: Path) -> Path:
    """What the repository holds, without what has been built in the working tree."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, to / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def in_checkout(clone: Path) -> dict[str, Path]:
    files = {package: clone / room / "__init__.py" for room, (package, _) in ROOMS.items()}
    return files | {"diffnet.train.cli": clone / "train/cli.py"}


def in_site(site: Path) -> dict[str, Path]:
    files = {package: site.joinpath(*package.split("."), "__init__.py") for package, _ in ROOMS.values()}
    return files | {"diffnet.train.cli": site / "diffnet/train/cli.py"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "a clone")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", copy_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("wheel"))


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a tree, as pip would."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def test_imports_from_a_clone(clone: Path, environment: Environment, tmp_path: Path) -> None:
    here, _ = environment.look(cwd=clone)
    assert here == in_checkout(clone)
    by_path, _ = environment.look(cwd=tmp_path, PYTHONPATH=str(clone))
    assert by_path == in_checkout(clone)


def test_imports_from_an_editable_install(clone: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install("-e", ".", cwd=clone)
    files, bare = environment.look(cwd=tmp_path)
    assert files == in_checkout(clone)
    assert not bare
    assert "Usage: diffnet" in usage(environment, tmp_path)


def test_imports_from_an_install(clone: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(".", cwd=clone)
    files, bare = environment.look(cwd=tmp_path)
    assert files == in_site(environment.site)
    assert not bare
    # In the clone its own files come first, all of them.
    here, _ = environment.look(cwd=clone)
    assert here == in_checkout(clone)


def test_imports_from_a_wheel(wheel: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(str(wheel), cwd=tmp_path)
    files, bare = environment.look(cwd=tmp_path)
    assert files == in_site(environment.site)
    assert not bare
    assert "Usage: diffnet" in usage(environment, tmp_path)
    assert "to-spectral" in environment.run("diffnet", "bench", "--list", cwd=tmp_path)
    assert {path.name.split("-")[0] for path in environment.site.iterdir()} == {"dependencies.pth", "diffnet"}


def usage(environment: Environment, cwd: Path) -> str:
    shown = environment.run("diffnet", "--help", cwd=cwd)
    return re.sub(r"\x1b\[[\d;]*m", "", shown)  # some build machines ask for colors


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
    assert names == expected_files()
    assert {"diffnet/py.typed", "diffnet/train/report/viewer.html"} <= names
    assert "licenses/LICENSE" in info


def expected_files() -> set[str]:
    """Every file of the rooms, where a wheel should hold it."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / room).as_posix()}"
        for room, (package, _) in ROOMS.items()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "benchmarks/results/" not in str(path)
        if path.name != "README.md"  # what stands beside benchmarks is for readers of the repository
    }


def test_metadata(wheel: Path) -> None:
    import diffnet  # not above: what breaks imports should break the tests that say so

    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(path))
    assert metadata["Name"] == "diffnet"
    assert metadata["Version"] == diffnet.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    requires = [str(r).replace('"', "'").replace(" ", "") for r in metadata.get_all("Requires-Dist", [])]
    assert [r for r in requires if r.startswith("torch>=")]
    triton = next(r for r in requires if r.startswith("triton"))
    assert triton.endswith(";platform_system=='Linux'")


def test_the_sdist_builds_the_same_wheel(wheel: Path, clone: Path, tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    shutil.unpack_archive(build("sdist", clone, tmp_path / "sdist"), tmp_path / "unpacked")
    (tree,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(build("wheel", tree, tmp_path / "wheel")) as again, zipfile.ZipFile(wheel) as first:
        assert sorted(again.namelist()) == sorted(first.namelist())


def test_importing_leaves_out_what_takes_long() -> None:
    """PyTorch's compiler alone takes a second. Each comes with its first use."""
    code = "import sys, diffnet; print([m for m in ('torch._dynamo', 'triton', 'trimesh') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_imports_without_triton_and_gpu() -> None:
    # Kernels are what Triton compiles; operations import them when they are first used.
    modules = sorted(
        module for module in modules_of_rooms() if not module.endswith("__main__") and "kernels" not in module
    )
    code = f"""
import importlib, sys
sys.modules["triton"] = None  # import triton raises ImportError
for name in {modules}:
    importlib.import_module(name)
"""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def modules_of_rooms() -> dict[str, Path]:
    """Every module by name, with its file."""
    modules = {}
    for room, (package, _) in ROOMS.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT / room).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


def imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[tuple[str, str | None]]:
    """(module, name) of each `from module import name`, and (module, None) of each `import module`.

    at_import_time: leave out what only functions or type checkers import
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here, so that a reader sees the room"
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        elif at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imports(ast.Module(node.orelse, []), at_import_time=True)
        else:
            yield from imports(node, at_import_time=at_import_time)


def imported_modules(module: str, *, at_import_time: bool) -> set[str]:
    """The modules that a module of this distribution names in its imports; those of the distribution in full."""
    modules = modules_of_rooms()
    found = set()
    for base, name in imports(ast.parse(modules[module].read_text()), at_import_time=at_import_time):
        found.add(f"{base}.{name}" if f"{base}.{name}" in modules else base)
    return found


def room_of(module: str) -> str:
    packages = {package for package, _ in ROOMS.values()}
    two = ".".join(module.split(".")[:2])
    return two if two in packages else "diffnet"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_lower_ones(room: str) -> None:
    package, allowed = ROOMS[room]
    for module in modules_of_rooms():
        if room_of(module) == package and module != ABOVE_ALL_ROOMS:
            for imported in imported_modules(module, at_import_time=False):
                assert imported != ABOVE_ALL_ROOMS, f"{module} imports {imported}"
                if imported.split(".")[0] == "diffnet":
                    assert room_of(imported) in {package, *allowed}, f"{module} imports {imported}"


def test_ops_need_torch_and_triton_only() -> None:
    """And a function that hands out a SciPy matrix needs SciPy."""
    for module in modules_of_rooms():
        if room_of(module) == "diffnet.ops":
            for at_import_time, allowed in ((True, {"torch", "triton"}), (False, {"torch", "triton", "scipy"})):
                roots = {imported.split(".")[0] for imported in imported_modules(module, at_import_time=at_import_time)}
                assert roots - sys.stdlib_module_names <= {"diffnet", *allowed}, module


def test_no_circles() -> None:
    modules = modules_of_rooms()
    graph = {m: imported_modules(m, at_import_time=True) & modules.keys() for m in modules}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
