"""One namespace, `diffnet`, in a checkout, an editable install and a wheel, and without what other systems lack."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import trimesh
from copies import ends_of_copies, forget
from rooms import ROOMS, ROOT, imports_of, modules, needs_triton

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

SUBPACKAGES = [room for room in ROOMS if room != "diffnet"]
IN_WHEELS = {room: package for room, (package, _) in ROOMS.items() if room != "benchmarks"}

LOOK = f"""
import json, pkgutil
from importlib.util import find_spec
names = ["diffnet", *(f"diffnet.{{room}}" for room in {SUBPACKAGES}), "diffnet.train.cli"]
files = {{name: spec.origin for name in names if (spec := find_spec(name))}}
# Folders that are found only because of the current folder are not installed.
bare = [name for name in {[*SUBPACKAGES, "tests"]} if find_spec(name)]
import diffnet
listed = [module.name for module in pkgutil.iter_modules(diffnet.__path__)]
print(json.dumps([files, bare, listed, find_spec("diffnet.diffnet") is not None]))
"""


def printed(*command: str, **options: Any) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Environment:
    """A temporary virtual environment that sees the dependencies of the running one.

    Python reads .pth files only in an environment's own site-packages, so an editable install in the running
    environment has no effect here.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self.site = next(folder.glob("lib/python*/site-packages"))
        dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "dependencies.pth").write_text("\n".join(dependencies))

    def run(self, *command: str, cwd: Path, **variables: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return printed(str(self.bin / command[0]), *command[1:], cwd=cwd, env=env | variables, timeout=120)

    def pip(self, command: str, *what: str, cwd: Path) -> None:
        flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        self.run("python", "-m", "pip", command, *flags, *what, cwd=cwd)

    def install(self, *what: str, cwd: Path) -> None:
        self.pip("install", "--no-compile", *what, cwd=cwd)

    def look(self, cwd: Path, **variables: str) -> tuple[dict[str, Path], list[str]]:
        """The files of the package and its subpackages, and the rooms that can be imported under a bare name."""
        files, bare, listed, nested = json.loads(self.run("python", "-c", LOOK, cwd=cwd, **variables))
        assert set(listed) >= {*IN_WHEELS, "model"} - {"diffnet"}
        assert len(listed) == len(set(listed))
        assert "diffnet" not in listed
        assert not nested
        return {name: Path(file) for name, file in files.items()}, bare


def copy_tree(to: Path) -> Path:
    """Copy the files of the repository, without build outputs."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, to / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def in_checkout(clone: Path) -> dict[str, Path]:
    files = {package: clone / room / "__init__.py" for room, (package, _) in ROOMS.items()}
    return files | {"diffnet.train.cli": clone / "train/cli.py"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "a clone")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` builds and installs."""
    environment, out = Environment(tmp_path_factory.mktemp("environment")), tmp_path_factory.mktemp("wheel")
    environment.pip("wheel", "--wheel-dir", str(out), ".", cwd=copy_tree(tmp_path_factory.mktemp("a tree")))
    (built,) = out.iterdir()
    return built


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a tree, as pip would."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    printed(sys.executable, "-c", code, str(out), cwd=tree)
    (built,) = out.iterdir()
    return built


def test_imports_from_a_clone(clone: Path, environment: Environment, tmp_path: Path) -> None:
    assert environment.look(cwd=clone)[0] == in_checkout(clone)
    assert environment.look(cwd=tmp_path, PYTHONPATH=str(clone))[0] == in_checkout(clone)


def test_imports_from_an_editable_install(clone: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install("-e", ".", cwd=clone)
    files, bare = environment.look(cwd=tmp_path)
    assert files == in_checkout(clone)
    assert not bare
    assert "Usage: diffnet" in usage(environment, tmp_path)


def test_imports_from_a_wheel(wheel: Path, clone: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(str(wheel), cwd=tmp_path)
    files, bare = environment.look(cwd=tmp_path)
    installed = {
        package: environment.site.joinpath(*package.split("."), "__init__.py") for package in IN_WHEELS.values()
    }
    assert files == installed | {"diffnet.train.cli": environment.site / "diffnet/train/cli.py"}
    assert not bare
    assert "Usage: diffnet" in usage(environment, tmp_path)
    assert {path.name.split("-")[0] for path in environment.site.iterdir()} == {"dependencies.pth", "diffnet"}
    assert environment.look(cwd=clone)[0] == in_checkout(clone)  # the files of a clone come first in it


def test_the_package_loads_no_heavy_module() -> None:
    code = "import diffnet, sys; print({'torch', 'triton', 'trimesh'} & sys.modules.keys())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "set()\n"


def test_all_modules_and_public_names_are_reached() -> None:
    """Where Triton and a GPU are absent. Tools for documentation walk through all modules."""
    assert ends_of_copies(reach_all, [()]) == [0]


def reach_all() -> None:
    forget("diffnet")
    # Operations import their kernels at first use, so all other modules load without Triton.
    triton = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    sys.modules |= dict.fromkeys(["triton", *triton])  # type: ignore[arg-type]  # importing it raises ImportError
    for name in sorted(name for name in modules() if not name.endswith("__main__") and not needs_triton(name)):
        importlib.import_module(name)
    del sys.modules["triton"]
    sys.modules |= triton
    diffnet = importlib.import_module("diffnet")
    rooms = {room: importlib.import_module(f"diffnet.{room}") for room in SUBPACKAGES}
    assert all(room.__all__ for room in rooms.values())
    assert {room for room in rooms if room in diffnet.__all__} == IN_WHEELS.keys() - {"diffnet"}
    assert "run_training" in rooms["train"].__all__
    missing = [name for room in (diffnet, *rooms.values()) for name in room.__all__ if not hasattr(room, name)]
    assert missing == []
    names = [module.name for module in pkgutil.walk_packages(diffnet.__path__, "diffnet.")]
    assert sorted(names) == sorted(modules().keys() - {"diffnet"})
    for name in names:
        importlib.import_module(name)


def usage(environment: Environment, cwd: Path) -> str:
    shown = environment.run("diffnet", "--help", cwd=cwd)
    return re.sub(r"\x1b\[[\d;]*m", "", shown)  # some build machines ask for colors


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.split(".dist-info/")[1] for name in archive.namelist() if ".dist-info/" in name}
    assert names == {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / room).as_posix()}"
        for room, package in IN_WHEELS.items()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"diffnet/py.typed", "diffnet/viz/viewer.html"} <= names
    assert "licenses/LICENSE" in info


def test_every_folder_is_a_package_of_the_wheel() -> None:
    """A folder that pyproject.toml does not list would be missing in an installed package only."""
    folders = {path.parent for path in modules().values()}
    assert {path.parent for path in modules().values() if path.name == "__init__.py"} == folders
    packages = {name for name, path in modules().items() if path.name == "__init__.py" and "benchmarks" not in name}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages)


def test_metadata(wheel: Path) -> None:
    import diffnet  # not above, so that a broken import fails only this test and those of imports

    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(path))
    expected = {"Name": "diffnet", "Version": diffnet.__version__, "License-Expression": "MIT"}
    assert {name: metadata[name] for name in expected} == expected
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


# ---- without what macOS or Windows lack, as far as Linux can tell ----


# Modules of Python that Windows doesn't have.
POSIX = {"crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd"}
POSIX |= {"readline", "resource", "spwd", "syslog", "termios", "tty"}
HIDDEN = """
import multiprocessing, os, signal, sys
from pathlib import Path
for name in {modules}:
    sys.modules[name] = None  # an import raises ImportError
del os.sched_getaffinity, signal.pthread_sigmask  # PyTorch itself needs os.register_at_fork on Linux
multiprocessing.get_all_start_methods = lambda: ["spawn"]
if __name__ == "__main__":
    {program}
"""
PROGRAM = """
    from diffnet.__main__ import main
    for command in ("train segmentation --data meshes --out run --jobs 2 --epochs 1 --k 8 --width 8 --blocks 1",
                    "predict new.ply --checkpoint run/last.pt --out labels.ply",
                    "precompute new.ply --jobs 2"):
        sys.argv = ["diffnet", *command.split(), *["--cache", "cache"]]
        try:
            main()
        except SystemExit as end:
            assert not end.code, command
"""


def test_no_module_of_one_system_is_imported_at_once() -> None:
    """Modules that Windows lacks are imported where they are used, after a look at the system."""
    found = [
        f"{name}, line {each.line}: {each.module}"
        for name, path in modules().items()
        for each in imports_of(name, path)
        if each.at_import_time and each.module.split(".")[0] in POSIX
    ]
    assert found == []


@pytest.mark.slow
def test_commands_run_without_them(tmp_path: Path) -> None:
    """Training with worker processes, prediction and preprocessing, in a process without Triton and the like."""
    (tmp_path / "meshes").mkdir()
    for i in range(4):
        mesh = trimesh.creation.icosphere(1)
        mesh.export(tmp_path / "meshes" / f"{i}.obj")
        (tmp_path / "meshes" / f"{i}.txt").write_text("\n".join(str(int(z > 0)) for z in mesh.vertices[:, 2]))
    trimesh.creation.icosphere(2).export(tmp_path / "new.ply")
    hidden = sorted({*POSIX - {"posix"}, "triton"})  # `os` itself is made of posix
    program = tmp_path / "hidden.py"
    program.write_text(HIDDEN.format(modules=hidden, program=PROGRAM.strip()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    printed(sys.executable, str(program), cwd=tmp_path, env=environment, timeout=400)
    assert (tmp_path / "labels.ply").is_file()
