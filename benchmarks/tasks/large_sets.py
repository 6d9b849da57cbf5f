"""Sets that are larger than the memory: the memory of a run, the time of its start, and a run that is killed.

    python -m diffnet.benchmarks.tasks.large_sets PART --folder FOLDER

The meshes are tori of 3,200 to 6,962 vertices with random radii, stretches and noise, and four classes. FOLDER gets
them, the cache and the runs, which `diffnet train segmentation` does on the CPU with its defaults. Needs Linux.

memory: the largest private memory of all processes together, every half second, from the start with an empty cache to
    --steps training steps: the PSS of anonymous and shared memory, so without pages of files. The set has 20,000
    meshes: 2,000 tori, each linked ten times.
start: CPU and wall-clock time from the start of the process to its first training step, with a stored index, for these
    20,000 meshes and for 20 of them. The CPU time is that of all threads.
kills: a run on 40 meshes that is killed ten times, in each tenth of its epochs at a random moment, and resumed. It may
    keep a tenth of the samples. It should end with the weights and the history of a run that keeps all of them.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import trimesh

from diffnet.benchmarks.harness.results import read_csv
from diffnet.geometry import make_mesh
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.resident import REST
from diffnet.viz import write_ply

TORI, LINKS = 2000, 10
FEW = 20
KILLED, KILLS, EPOCHS, K = 40, 10, 20, 128


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("memory", "start", "kills"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part == "memory":
        measure_memory(given.folder, given.steps)
    elif given.part == "start":
        measure_start(given.folder)
    else:
        kill_and_resume(given.folder)


def write_set(root: Path, tori: int, links: int) -> None:
    """Tori with a class for each vertex, each under several names. Nothing is done if they are there."""
    if root.exists():
        return
    for part in ("meshes", "labels"):
        (root / part).mkdir(parents=True)
    for i in range(tori):
        rng = np.random.default_rng(i)
        sections = int(rng.integers(40, 60))
        torus = trimesh.creation.torus(1.0, rng.uniform(0.2, 0.5), major_sections=2 * sections, minor_sections=sections)
        verts = torus.vertices * rng.uniform(0.7, 1.3, 3) + rng.normal(0, 0.002, torus.vertices.shape)
        first = f"torus_{i:04}_0"
        write_ply(root / "meshes" / f"{first}.ply", make_mesh(verts, torus.faces))
        np.save(root / "labels" / f"{first}.npy", (verts[:, 0] > 0) + 2 * (verts[:, 1] > 0))
        for j in range(1, links):
            for part, suffix in (("meshes", ".ply"), ("labels", ".npy")):
                os.link(root / part / f"{first}{suffix}", root / part / f"torus_{i:04}_{j}{suffix}")


def trained(folder: Path, data: str, out: str, *options: object) -> subprocess.Popen[bytes]:
    """Start a run."""
    own = ["--data", folder / data, "--out", folder / out, "--cache", folder / "cache", "--device", "cpu", *options]
    return subprocess.Popen([sys.executable, "-m", "diffnet", "train", "segmentation", *map(str, own)])


def until(process: subprocess.Popen[bytes], happened: Callable[[], bool], pause: float = 0.01) -> None:
    """Wait. Raises RuntimeError if the process ends before."""
    while not happened():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
        time.sleep(pause)


def measure_memory(folder: Path, steps: int) -> None:
    """See "memory" above."""
    write_set(folder / "big", TORI, LINKS)
    started, most = time.perf_counter(), 0.0

    def looked() -> bool:
        nonlocal most
        found = sum(map(private_memory, descendants(process.pid)))
        if found > 1.02 * most:
            print(f"{time.perf_counter() - started:6.0f} s  {found / 2**20:.2f} GiB", flush=True)
        most = max(most, found)
        return (folder / "memory" / "last.pt").exists()

    process = trained(folder, "big", "memory", "--checkpoint-every", steps)
    until(process, looked, 0.5)
    process.kill()
    print(f"{time.perf_counter() - started:6.0f} s  {steps} steps; at most {most / 2**20:.2f} GiB")


def descendants(pid: int) -> list[int]:
    """A process and those that it has started."""
    try:
        tasks = Path(f"/proc/{pid}/task")
        below = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [pid, *(own for child in below for own in descendants(child))]


def private_memory(pid: int) -> int:
    """Of a process, in KiB, without pages of files."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def measure_start(folder: Path) -> None:
    """See "start" above."""
    write_set(folder / "big", TORI, LINKS)
    write_set(folder / "few", FEW, 1)
    for data in ("few", "big"):
        for memory in (0.01, 2):
            for turn in range(3):
                out = f"start-{data}-{memory}-{turn}"
                started = time.perf_counter()
                process = trained(folder, data, out, "--checkpoint-every", 1, "--memory", memory)
                until(process, (folder / out / "last.pt").exists)
                seconds = time.perf_counter() - started
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                process.kill()
                process.wait()
                used = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
                print(f"{data} --memory {memory}: {used:.2f} s of CPU time, {seconds:.2f} s", flush=True)


def kill_and_resume(folder: Path) -> None:
    """See "kills" above."""
    write_set(folder / "killed", KILLED, 1)
    labels = sorted((folder / "killed" / "labels").iterdir())
    total = sum(len(np.load(file)) * (4 * K + REST) for file in labels) / 2**30
    memory = round(total / 10, 4)
    print(f"{total:.3f} GiB of samples, --memory {memory}", flush=True)
    options: list[object] = ["--epochs", EPOCHS, "--k", K, "--width", 16, "--blocks", 1, "--checkpoint-every", 7]
    options += ["--features", "xyz", "--no-rotate", "--jitter", 0.01]
    if trained(folder, "killed", "resident", *options, "--memory", 8).wait():
        raise RuntimeError("the run with all samples in memory failed")
    epoch = median(float(row["seconds"]) for row in rows(folder / "resident"))
    generator = random.Random(0)
    out = folder / "streamed"
    for i in range(KILLS + 1):
        more = ["--resume"] if (out / "last.pt").exists() else []
        process = trained(folder, "killed", "streamed", *options, "--memory", memory, *more)
        if i == KILLS:
            break
        moment = (i + generator.random()) * EPOCHS / KILLS
        until(process, lambda complete=int(moment): len(rows(out)) >= complete)  # type: ignore[misc]
        time.sleep(moment % 1 * epoch)
        process.kill()
        process.wait()
        print(f"killed at {moment:.2f} of {EPOCHS} epochs", flush=True)
    if process.wait():
        raise RuntimeError("the last run failed")
    first, second = (load_checkpoint(folder / name / "last.pt") for name in ("resident", "streamed"))
    weights = all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())
    history = [{**row, "seconds": 0} for row in first["history"]] == [
        {**row, "seconds": 0} for row in second["history"]
    ]
    print(f"equal weights: {weights}; equal history of {len(second['history'])} epochs: {history}")
    print(f"unfinished files in the cache: {len(list((folder / 'cache').rglob('*.tmp')))}")
    if not (weights and history):
        sys.exit(1)


def rows(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.csv, or none."""
    file = run / "metrics.csv"
    return read_csv(file) if file.exists() else []


if __name__ == "__main__":
    main()
