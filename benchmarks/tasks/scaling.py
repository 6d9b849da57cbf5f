"""How `torchrun … diffnet` scales over the GPUs of one host: training, preprocessing, and a run that loses a rank.

    python -m diffnet.benchmarks.tasks.scaling --data RNA --out FOLDER

The meshes are copies of those of a labeled data set, with noise of 1 % of an edge in each coordinate. The last ones,
at least one, are test meshes. They lie in a temporary folder with their caches. N ranks have N GPUs, or with
`--device cpu` no GPU, and their share of the cores. Other options are those of `diffnet train segmentation`. Rows are
written as they come, and a run that fails has a row with its error.

training: scaling.csv has a row for each number of ranks and each batch. A batch has 4 meshes for each rank, or 8 or 32
    in all. Seconds of a step are the median over epochs of the mean from step to step within an epoch, without the
    first epochs, in which graphs are recorded. `epoch_steps_per_second` includes all else of an epoch. `weak` is
    vertices per second over those of one rank with 4 meshes, and `strong` over those of one rank with the same batch,
    each divided by the ranks. `waiting` is the share of a step in which a rank waits for the slowest one, mean over the
    ranks, and `exchange` the share in which the gradients are summed. One rank is a plain process, and "torchrun" is
    the same under torchrun.
preprocessing: preprocessing.csv has `diffnet precompute` of all meshes with an empty cache, in processes that have
    preprocessed other copies before. The seconds of each phase are those of all threads and processes together.
resume: resume.csv has a run that ends, the same one with a rank that is killed, and that one resumed with half of the
    ranks, all without dropout.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from matplotlib.figure import Figure

from diffnet.benchmarks.harness.results import read_csv, write_csv
from diffnet.benchmarks.tasks.programs import results
from diffnet.data import LabeledMesh, available_cores, load_dataset
from diffnet.geometry import mesh_edges
from diffnet.geometry.files import write_atomically
from diffnet.geometry.processes import Phase, WorkerPool
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.device import pick_device
from diffnet.train.run import surroundings
from diffnet.viz import write_ply

PARTS = ("training", "preprocessing", "resume")
NOISE = 0.01  # of the mean edge
PER_RANK = 4  # meshes, for weak scaling
BATCHES = (8, 32)  # meshes, for strong scaling
# Epochs before the measured ones, for each rank. Graphs are recorded in them. A rank moves a mesh to its GPU when it
# first gets the mesh. Each of N ranks gets 1 / N of the meshes in an epoch, so after 5 N epochs it has all but 0.7 %.
WARM = 5
WARM_MESHES = 32  # for each rank, as a GPU takes at once
WRITERS = 16  # processes; each takes seconds to start
TIMEOUT = 60.0  # seconds for each command, and for the start and the end of all ranks


class Host(NamedTuple):
    """What all runs share.

    ranks: the most that a run has
    work: a temporary folder, with the meshes in `set`
    vertices: of all training meshes
    """

    ranks: int
    device: str
    k: int
    steps: int
    work: Path
    out: Path
    train_meshes: int
    vertices: int
    options: list[str]

    def precompute(self, cache: Path, *paths: object) -> list[str]:
        return [*_words("precompute", *paths, "--cache", cache, "--k", self.k, "--device", self.device)]

    def train(self, out: Path, batch: int, ranks: int, *more: object) -> list[str]:
        steps = -(-self.train_meshes // batch)
        epochs = WARM * ranks - (-self.steps // steps)
        own = ["--data", self.work / "set", "--out", out, "--cache", self.work / "cache", "--k", self.k]
        own += ["--device", self.device, "--batch-meshes", batch, "--epochs", epochs, "--eval-every", epochs]
        return _words("train", "segmentation", *own, *self.options, *more)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", required=True, help="a labeled data set, see `load_dataset`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, nargs="+", help="by default 1, 2, 4 and 8, as many as there are GPUs")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="meshes, for strong scaling")
    parser.add_argument("--copies", type=int, default=4, help="of each mesh")
    parser.add_argument("--steps", type=int, default=200, help="steps to measure of each training")
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--device", default="auto")
    given, options = parser.parse_known_args(arguments)
    gpus = 0 if given.device == "cpu" else torch.cuda.device_count()
    ranks = given.ranks or [n for n in (1, 2, 4, 8) if n <= max(gpus, 1)]
    given.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "command": ["python", "-m", "diffnet.benchmarks.tasks.scaling", *(arguments or sys.argv[1:])],
        "gpus": gpus,
        **surroundings(pick_device(given.device)),
        "seconds": {},
    }

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        record["seconds"][name] = round(time.perf_counter() - started, 1)
        write_atomically(given.out / "run.json", json.dumps(record, indent=2) + "\n")
        print(f"{name}: {record['seconds'][name]} s", flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a killed rank may still write
        work = Path(folder)
        with noted("meshes"):
            largest = max(PER_RANK * max(ranks), *given.batches)
            trained, vertices = write_set(given.data, work / "set", given.copies, largest)
        host = Host(max(ranks), given.device, given.k, given.steps, work, given.out, trained, vertices, options)
        for part in given.parts:
            if part != "preprocessing" and not (work / "cache").exists():
                with noted("cache"):
                    _, error = attempted(host, host.ranks, [host.precompute(work / "cache", work / "set")])
                if error:
                    raise SystemExit(error)
            with noted(part):
                if part == "training":
                    measure_training(host, sorted(ranks), given.batches)
                elif part == "preprocessing":
                    measure_preprocessing(host, sorted(ranks, reverse=True))
                else:
                    measure_resume(host)
            plot(given.out)


def write_set(data: str, folder: Path, copies: int, batch: int) -> tuple[int, int]:
    """Write the training and test meshes of a data set. Returns the number of training meshes and of their vertices.

    batch: training meshes are a multiple of this
    """
    found = load_dataset(data)
    items = [*found.train, *found.test]
    names = [(i, copy) for copy in range(copies) for i in range(len(items))]
    trained = (len(names) - 1) // batch * batch
    if trained == 0:
        raise SystemExit(f"{copies} copies of {len(items)} meshes should be more than a batch of {batch}")
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
    with WorkerPool(min(available_cores(), WRITERS), 1) as pool:
        calls = [
            pool.submit(write_copy, items[i], folder / ("train" if n < trained else "test") / f"{copy}-{i}.ply", copy)
            for n, (i, copy) in enumerate(names)
        ]
        vertices = [call.result() for call in calls]
    return trained, sum(vertices[:trained])


def write_copy(item: LabeledMesh, path: Path, copy: int) -> int:
    """Write one mesh and its labels. Returns its vertices. Copy 0 has no noise."""
    mesh = item.mesh
    first, second = mesh.verts[mesh_edges(mesh.faces)].transpose(1, 0, 2)
    noise = NOISE * np.linalg.norm(first - second, axis=1).mean() if copy else 0.0
    verts = mesh.verts + noise * np.random.default_rng(copy).standard_normal(mesh.verts.shape)
    write_ply(path, (verts, mesh.faces), labels=item.labels)
    return len(verts)


def measure_training(host: Host, ranks: Sequence[int], batches: Sequence[int]) -> None:
    """Write scaling.csv."""
    rows: list[dict[str, Any]] = []
    for count in ranks:
        wanted = [b for b in sorted({PER_RANK * count, *batches}) if b >= count]
        for launcher in ("plain", "torchrun") if count == 1 else ("torchrun",):
            own = wanted if launcher == "plain" or count > 1 else [PER_RANK]
            runs = [host.work / f"{launcher}-{count}-{batch}" for batch in own]
            commands = [host.train(run, batch, count) for run, batch in zip(runs, own, strict=True)]
            found, error = attempted(host, count, commands, launcher)
            for i, (batch, run) in enumerate(zip(own, runs, strict=True)):
                row = {"ranks": count, "launcher": launcher, "batch": batch, **dict.fromkeys(MEASURED), "error": ""}
                if all(i < len(of_rank) for of_rank in found):
                    row |= training_row(host, batch, run, [of_rank[i] for of_rank in found])
                else:
                    row["error"] = error
                rows.append(row)
                shutil.rmtree(run, ignore_errors=True)
            write_csv(host.out / "scaling.csv", with_shares(rows))


MEASURED = (
    "steps_per_second",
    "vertices_per_second",
    "epoch_steps_per_second",
    "waiting",
    "exchange",
    "exchanged_bytes",
    "steps_measured",
    "command_seconds",
)


def training_row(host: Host, batch: int, run: Path, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measured columns of a row. found: what each rank has written"""
    steps = -(-host.train_meshes // batch)
    warm = WARM * len(found)
    epochs = [rank["epochs"][warm:] for rank in found]
    seconds = median(fmean(epoch["steps"]) for epoch in epochs[0] if epoch["steps"])
    # (ranks, epochs, steps). In the first step of an epoch, ranks wait for rank 0, which tests and writes files.
    exchanges = np.array([[epoch["exchanges"][1:] for epoch in rank] for rank in epochs])
    sums = exchanges.min(axis=0, initial=np.inf) if exchanges.size else np.zeros((1, 1))
    waiting = (exchanges - sums).mean(axis=(0, 2)) if exchanges.size else np.zeros(1)
    whole = [float(row["seconds"]) for row in read_csv(run / "metrics.csv")[warm:-1]]  # the last one tests
    return {
        "steps_per_second": _short(1 / seconds),
        "vertices_per_second": _short(host.vertices / steps / seconds),
        "epoch_steps_per_second": _short(steps / median(whole)) if whole else None,
        "waiting": _short(float(np.median(waiting)) / seconds),
        "exchange": _short(float(np.median(sums.mean(axis=1))) / seconds),
        "exchanged_bytes": found[0]["sent"],
        "steps_measured": sum(len(epoch["steps"]) for epoch in epochs[0]),
        "command_seconds": _short(found[0]["seconds"]),
    }


def with_shares(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their shares of linear scaling. None where one rank has not been measured."""
    rates = {row["batch"]: row["vertices_per_second"] for row in rows if row["launcher"] == "plain"}

    def share(row: dict[str, Any], batch: int) -> float | None:
        one, rate = rates.get(batch), row["vertices_per_second"]
        return _short(rate / row["ranks"] / one) if rate and one else None

    return [
        {
            **row,
            "weak": share(row, PER_RANK) if row["batch"] == PER_RANK * row["ranks"] else None,
            "strong": share(row, row["batch"]),
        }
        for row in rows
    ]


def measure_preprocessing(host: Host, ranks: Sequence[int]) -> None:
    """Write preprocessing.csv. The last cache stays for other parts."""
    rows: list[dict[str, Any]] = []
    files = sorted((host.work / "set").rglob("*.ply"))
    for count in ranks:
        cache, warm = host.work / "cache", host.work / "warm"
        for folder in (cache, warm):
            shutil.rmtree(folder, ignore_errors=True)
        first = host.precompute(warm, *files[: WARM_MESHES * count])
        found, error = attempted(host, count, [first, host.precompute(cache, host.work / "set")])
        row: dict[str, Any] = {"ranks": count, "cores": _cores(host, count), "meshes": len(files)}
        row |= {"seconds": None, "error": error, **dict.fromkeys(get_args(Phase))}
        if len(found[0]) == 2:
            measured = found[0][1]
            row |= {"seconds": _short(measured["seconds"]), **{k: _short(s) for k, s in measured["phases"].items()}}
        rows.append(row)
        seconds = {row["ranks"]: row["seconds"] for row in rows}
        one = seconds.get(1)
        shared = [
            {**row, "linear": _short(one / row["seconds"] / row["ranks"]) if one and row["seconds"] else None}
            for row in rows
        ]
        write_csv(host.out / "preprocessing.csv", shared)


def measure_resume(host: Host) -> None:
    """Write resume.csv. The rank to kill and the moment are random."""
    rows: list[dict[str, Any]] = []
    batch, few = PER_RANK * host.ranks, max(host.ranks // 2, 1)
    more = ["--dropout", 0, "--checkpoint-every", 5]
    for name in ("whole", "killed", "resumed"):
        ranks = few if name == "resumed" else host.ranks
        run = host.work / ("whole" if name == "whole" else "killed")
        command = host.train(run, batch, 1, *more, *(["--resume"] if name == "resumed" else []))
        begun = time.perf_counter()
        if name == "killed":
            rank, error = killed_run(host, command, run)
        else:
            rank, (_, error) = None, attempted(host, ranks, [command])
        stored = load_checkpoint(run / "last.pt") if (run / "last.pt").exists() else None
        done = (run / "results.json").exists()
        rows.append(
            {
                "run": name,
                "ranks": ranks,
                "killed_rank": rank,
                "epochs": len(stored["history"]) if stored else None,
                "steps_of_next_epoch": (stored["position"] or {}).get("steps", 0) if stored else None,
                "train_loss": stored["history"][-1]["train_loss"] if stored and stored["history"] else None,
                "test_accuracy": results(run)["test_accuracy"] if done else None,
                "seconds": _short(time.perf_counter() - begun),
                "error": error,
            }
        )
        write_csv(host.out / "resume.csv", rows)


def killed_run(host: Host, command: list[str], run: Path) -> tuple[int, str]:
    """Start a run and kill one of its ranks after a quarter of its epochs. Returns the rank, and what the run said."""
    epochs = int(command[command.index("--epochs") + 1])
    rank, folder = random.randrange(host.ranks), host.work / "start"
    with started_ranks(host, host.ranks, [command], folder) as process:
        deadline = time.monotonic() + TIMEOUT
        table = run / "metrics.csv"
        while not table.exists() or len(read_csv(table)) < epochs / 4:
            if process.poll() is not None or time.monotonic() > deadline:
                return rank, f"no epoch before the end: {_end_of_log(folder)}"
            time.sleep(0.002)
        time.sleep(random.random() * 0.05)
        os.kill(int((folder / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIMEOUT)
        said = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("diffnet: ")]
        return rank, said[0] if said else f"exit code {process.returncode}"


def attempted(
    host: Host, ranks: int, commands: Sequence[list[str]], launcher: str = "torchrun"
) -> tuple[list[list[dict[str, Any]]], str]:
    """Run commands of diffnet one after another. Returns what each rank wrote, and the error of one that failed."""
    folder, limit = host.work / "start", (1 + len(commands)) * TIMEOUT
    error = ""
    with started_ranks(host, ranks, commands, folder, launcher) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            error = f"no end after {limit:.0f} s"
        else:
            error = f"exit code {code}: {_end_of_log(folder)}" if code else ""
    if error:
        print(error, flush=True)
    written = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
    return [
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in written
    ], error


@contextmanager
def started_ranks(
    host: Host, ranks: int, commands: Sequence[list[str]], folder: Path, launcher: str = "torchrun"
) -> Iterator[subprocess.Popen[bytes]]:
    """Processes that run commands, see `timed_rank`. They have a share of the cores, and end with the block."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "commands.json").write_text(json.dumps([list(command) for command in commands]))
    words = [sys.executable, "-m"]
    if launcher == "torchrun":
        words += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words += ["diffnet.benchmarks.tasks.timed_rank", str(folder)]
    cores = sorted(os.sched_getaffinity(0))[: _cores(host, ranks)]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cores(host: Host, ranks: int) -> int:
    return max(available_cores() * ranks // host.ranks, 1)


def _end_of_log(folder: Path) -> str:
    return (folder / "log.txt").read_text(errors="replace")[-600:].replace("\n", " | ")


def _words(*words: object) -> list[str]:
    return [*map(str, words)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def plot(out: Path) -> None:
    """Draw the shares of linear scaling from the tables of a folder into scaling.png."""
    tables = {path.stem: read_csv(path) for path in out.glob("*.csv")}
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in tables.get("scaling", []):
        for kind in ("weak", "strong"):
            if row[kind] and (row["launcher"] == "plain" or int(row["ranks"]) > 1):
                of = f"{PER_RANK} meshes a rank" if kind == "weak" else f"{row['batch']} meshes in all"
                lines.setdefault(f"training, {of}", []).append((int(row["ranks"]), float(row[kind])))
    for row in tables.get("preprocessing", []):
        if row["linear"]:
            lines.setdefault("preprocessing", []).append((int(row["ranks"]), float(row["linear"])))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(1, color="0.3", lw=1, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("ranks")
    axes.set_ylabel("share of linear scaling")
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(frameon=False, fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    write_atomically(out / "scaling.png", picture.getvalue())


if __name__ == "__main__":
    main()
