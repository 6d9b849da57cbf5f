"""Whole runs of `diffnet train segmentation`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.tables import ORIGINAL
from diffnet.geometry.errors import OptionError

EPOCHS = 100
RECIPES = (ORIGINAL, f"{ORIGINAL} --batch-meshes 4", f"{ORIGINAL} --features xyz", "")
DETAILS = ("preprocessing_seconds", "training_seconds", "test_accuracy")


@benchmark("command", x="epochs")
def command(options: Options) -> Iterator[Case]:
    """Whole runs of `diffnet train segmentation` on the folder --data, with empty and with filled caches.

    The time is that of the process, from its start to its end. Each run starts once. The caches are diffnet's and
    Triton's. The recipes of the original use the caches that the first case has filled. The default recipe, with
    operators of its own, starts with empty caches again.
    """
    if options.data is None:
        raise OptionError("the benchmark 'command' needs --data, a folder of labeled meshes for diffnet train")
    with TemporaryDirectory() as folder:
        for recipe in RECIPES:
            run = partial(run_command, options, recipe.split(), Path(folder) / ("original" if recipe else "default"))
            peers: dict[str, Run] = {"warm caches": run}
            if recipe in (ORIGINAL, ""):
                peers = {"cold caches": run, **peers}
            yield Case({"options": recipe or "none", "epochs": EPOCHS}, peers, details=DETAILS)


def run_command(options: Options, recipe: list[str], folder: Path) -> dict[str, Any]:
    """Run the command with caches in a folder, and return the results that it writes.

    Raises RuntimeError with the last lines of its output if it fails.
    """
    out = folder / f"run-{len(list(folder.glob('run-*')))}"
    arguments = ["--data", str(options.data), "--out", str(out), "--cache", str(folder / "cache")]
    arguments += ["--epochs", str(EPOCHS), "--device", str(options.device), *recipe]
    if options.k is not None:
        arguments += ["--k", str(options.k)]
    if options.widths is not None:
        arguments += ["--width", str(options.widths[0])]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "diffnet", "train", "segmentation", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"diffnet train ended with exit code {done.returncode}: {done.stderr[-200:]}")
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found
