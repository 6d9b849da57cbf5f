"""The CPU path without what macOS or Windows lack, as far as Linux can tell: modules, functions and start methods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trimesh
from rooms import imports_of, modules

# Modules of Python that Windows doesn't have.
POSIX = {
    "crypt",
    "fcntl",
    "grp",
    "nis",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
    "termios",
    "tty",
}
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
    run = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "labels.ply").is_file()
