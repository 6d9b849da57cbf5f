"""The tables of README.md, of pages in docs/ and of results, made from committed results.

`python -m diffnet.benchmarks.tables` writes them. Each table stands between two comments of a page:
`<!-- table NAME -->` and `<!-- end of table -->`. A table whose result files are missing stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.markdown import percent, table, updated
from diffnet.benchmarks.tasks.tables import tasks

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmarks" / "results"
LOOPS = RESULTS / "loops-h200"
ORIGINAL = "--recipe original"
INTERNAL = ("diffnet-captured", "diffnet-graphed-fused", "diffnet, largest batch")  # peers that show what is possible


class Results:
    """The results of a benchmark in a folder. Raises FileNotFoundError if they are missing."""

    def __init__(self, folder: Path, benchmark: str) -> None:
        self.rows = read_csv(folder / f"{benchmark}.csv")
        self.run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        self.folder = f"{folder.parent.name}/{folder.name}"

    def number(self, column: str, peer: str, **case: str) -> float | None:
        """A number of a peer in the case with these parameters. None if it was not measured."""
        wanted = {"peer": peer, **case}
        for row in self.rows:
            if all(row[name] == value for name, value in wanted.items()) and row[column]:
                return float(row[column])
        return None

    def ms(self, peer: str, **case: str) -> float | None:
        return self.number("median_ms", peer, **case)

    def values(self, column: str) -> list[str]:
        """The different values of a column, in their order."""
        return list(dict.fromkeys(row[column] for row in self.rows))

    def peers(self) -> list[str]:
        """The peers of a loop that users choose between, and `original`."""
        return [peer for peer in self.values("peer") if peer not in INTERNAL]

    def source(self) -> str:
        """The folder, the machine and the command of the run."""
        command = re.sub(r"(--out|--data) \S+", r"\1 DIR", " ".join(self.run["command"]))
        command = re.sub("^diffnet bench", "python -m diffnet.benchmarks", command)  # the name in older results
        versions = self.run["versions"]
        return (
            f"Folder `{self.folder}`: {self.run['device']}, PyTorch {versions['torch']}, {self.run['date'][:10]}.\n"
            f"The command is `{command}`."
        )


def short(results: Path) -> str:
    """The table of the README: a training step in bf16."""
    found = Results(results / "steps", "train-step")
    peers = {
        "original's form": "original",
        "plain PyTorch": "plain",
        "diffnet": "diffnet",
        "`graphed`": "diffnet-graphed",
        "`GraphedStep`": "diffnet-step",
        "`diffnet train`": "diffnet-command",
    }
    if "diffnet-step" not in found.values("peer"):  # results from before there was one
        del peers["`GraphedStep`"]
    text = (
        "Wall-clock time of one training step of 4 blocks of width 128 with 128 eigenpairs, on one\n"
        f"{found.run['device']} ([results](benchmarks/results/{found.folder})). The original's form is a\n"
        "reimplementation with sparse COO gradients and a loop over meshes, in float32. The others compute in bf16.\n\n"
    )
    text += _by_size(found, "bf16", peers)
    if (results / "command" / "command.csv").exists():
        whole = Results(results / "command", "command")
        recipe = original_recipe(whole)
        cold, warm = (whole.ms(peer, options=recipe) for peer in ("cold caches", "warm caches"))
        text += (
            f"\n`diffnet train segmentation {ORIGINAL}` on the RNA data set (80 training meshes of about\n"
            f"15,000 vertices, 260 classes, 100 epochs) takes {_seconds(warm)} with warm caches and "
            f"{_seconds(cold)} with empty ones,\n"
            f"from mesh files to the report ([results](benchmarks/results/{whole.folder})). "
            f"The test accuracy is {percent(whole.number('test_accuracy', 'warm caches', options=recipe))}.\n"
        )
    return text


def original_recipe(whole: Results) -> str:
    """The options of the runs with the recipe of the original. It was the default until the recipes had names."""
    return ORIGINAL if ORIGINAL in whole.values("options") else "none"


def in_every_dtype(title: str, folder: str, benchmark: str, results: Path, gpu: bool = True) -> str:
    """Times of steps in every dtype. gpu: with the time of the GPU in parentheses"""
    found = Results(results / folder, benchmark)
    text = f"## {title}\n\n{found.source()}\n{STEPS}"
    for dtype in found.values("dtype"):
        text += f"\nIn {dtype}:\n\n" + _by_size(found, dtype, {peer: peer for peer in found.peers()}, gpu)
    return text


def float32(results: Path) -> str:
    """A training step in full float32, with memory."""
    found = Results(results / "fp32", "train-step")
    text = "## Training step in float32\n\n" + found.source() + "\nMemory is what PyTorch reserves.\n\n"
    lines = []
    for peer in found.peers():
        cells = [_time_and_memory(found, peer, vertices=v) for v in found.values("vertices")]
        lines.append([f"`{peer}`", *cells])
    return text + table(["peer", *(f"{int(v):,} vertices" for v in found.values("vertices"))], lines)


def training_loop(results: Path) -> str:
    """Steps of a loop over mixed meshes: time and memory."""
    found = Results(results / "loop", "training-loop")
    loops = found.values("loop")
    text = "## Training loop\n\n" + found.source() + "\n"
    text += (
        "The 24 meshes have 2,000 to 20,000 vertices. The table shows wall-clock time per step, and the memory that\n"
        "PyTorch reserves beyond the data.\n\n"
    )
    lines = []
    for peer in found.peers():
        cells = [_time_and_memory(found, peer, loop=name) for name in loops]
        lines.append([f"`{peer}`", *cells])
    return text + table(["peer", *loops], lines)


def command(results: Path) -> str:
    """Whole runs of the command line."""
    found = Results(results / "command", "command")
    text = "## Whole commands\n\n" + found.source() + "\n"
    text += "The total is the time of the process, with imports, preprocessing and the report.\n"
    if original_recipe(found) == "none":
        text += "These runs used the recipe of the original, which was the default then.\n"
    text += "\n"
    lines = []
    for row in found.rows:
        if row["error"]:
            continue
        lines.append(
            [
                "none" if row["options"] == "none" else f"`{row['options']}`",
                row["peer"],
                _seconds(float(row["median_ms"])),
                f"{float(row['preprocessing_seconds']):.1f} s",
                f"{float(row['training_seconds']):.1f} s",
                percent(float(row["test_accuracy"])),
            ]
        )
    return text + table(["options", "caches", "total", "preprocessing", "training", "test accuracy"], lines)


def maps(results: Path) -> str:
    """Functional maps of many pairs, and a training step on one pair, each with memory."""
    found = Results(results / "maps", "functional-map")
    text = "## Functional maps\n\n" + found.source() + "\n\n"
    text += "K = 200 and 256 features, forward and backward, in wall-clock time. `diffnet` computes in float64.\n\n"
    peers = found.values("peer")
    lines = [
        [pairs, *(_time_and_memory(found, peer, pairs=pairs) for peer in peers)] for pairs in found.values("pairs")
    ]
    text += table(["pairs", *(f"`{p}`" for p in peers)], lines)
    step = Results(results / "maps", "pair-step")
    text += "\nAn unsupervised training step on a pair of meshes of 5,000 vertices, K = 200, in float32:\n\n"
    lines = [[f"`{p}`", _ms(step.ms(p)), _gib(step.number("peak_mb", p))] for p in step.values("peer")]
    return text + table(["peer", "time", "memory"], lines)


def matching(results: Path) -> str:
    """Two meshes matched from features, with memory."""
    found = Results(results / "match", "match")
    text = "## Matching\n\n" + found.source() + "\n\n"
    text += (
        "The input is 256 features at the vertices of two meshes. The result is a vertex of the first mesh for each\n"
    )
    text += (
        "vertex of the second one. K = 200, in float32. The refined map is one of before 2026-11-28, by two "
        "conversions to points and back.\n\n"
    )
    peers = found.values("peer")
    lines = [
        [f"{int(v):,}", *(_time_and_memory(found, peer, vertices=v) for peer in peers)]
        for v in found.values("vertices")
    ]
    return text + table(["vertices", *peers], lines)


OPERATIONS = {
    "gradient-features": "gradient features",
    "to-spectral": "projection to the basis",
    "mlp": "MLP with dropout",
}


def operations(results: Path) -> str:
    """The dense operations of a block, each way, with their share of the floor."""
    text = "## Operations of a block\n\n"
    lines: list[list[str]] = []
    for benchmark, title in OPERATIONS.items():
        found = Results(results.parent / "kernels-h200" / "operations", benchmark)
        text += "" if lines else f"{found.source()}\n"
        for way in found.values("pass"):
            case = {"pass": way, "width": "256"}, {"pass": way, "width": "128"}
            compiled, own = ([found.ms(peer, **each) for each in case] for peer in ("compiled", "triton"))
            faster = [f"{a / b:.1f}×" for a, b in zip(compiled, own, strict=True) if a and b]
            shares = [_share(found, "triton", **each) for each in case]
            cells = [[_ms(x) for x in compiled], [_ms(x) for x in own], faster, shares]
            lines.append([f"{title}, {way}", *(f"{wide} ({narrow})" for wide, narrow in cells)])
    text += "In bf16 with 128 eigenpairs. The width is 256; values for width 128 are in parentheses.\n\n"
    return text + table(["operation", "`torch.compile`", "diffnet", "speedup", "share of the floor"], lines)


def sparse(results: Path) -> str:
    """Products of sparse matrices, block attention and eigenbases, beside their peers."""
    kernels = results.parent / "kernels-h200"
    products = Results(kernels / "spmm", "spmm")
    lines = []
    for order in products.values("order"):
        for dtype in products.values("dtype"):
            case = {"order": order, "dtype": dtype}
            cells = [f"{_ms(products.ms(peer, **case))}, {_share(products, peer, **case)}" for peer in products.peers()]
            lines.append([order, dtype, *cells])
    text = f"## Sparse products, attention and eigenbases\n\n{products.source()}\n"
    text += "A matrix of a mesh with 1,000,000 rows times 128 columns, with the share of the floor.\n\n"
    text += table(["order of the rows", "dtype", *(f"`{peer}`" for peer in products.peers())], lines)
    attention = Results(kernels / "attention", "block-attention")
    text += f"\n{attention.source()}\nBlock-sparse attention with blocks of 128:\n\n"
    lines = []
    for density in attention.values("density"):
        for way in attention.values("pass"):
            cells = [_ms(attention.ms(peer, **{"density": density, "pass": way})) for peer in ("triton", "flex")]
            lines.append([density, way, *cells])
    text += table(["density", "pass", "diffnet", "FlexAttention"], lines)
    basis = Results(kernels / "eigenbasis", "eigenbasis")
    text += f"\n{basis.source()}\n96 eigenpairs of a Laplacian, to the memory of the host or of the GPU:\n\n"
    lines = []
    for v in basis.values("vertices"):
        lines.append([f"{int(v):,}", *(_ms(basis.ms(peer, vertices=v)) for peer in basis.values("peer"))])
    return text + table(["vertices", *basis.values("peer")], lines)


def conditions(results: Path) -> str:
    """A training step with conditions and tokens."""
    found = Results(results / "conditions", "conditioned-step")
    text = "## Conditions and tokens\n\n" + found.source() + "\n"
    text += "A training step on one mesh of 10,000 vertices in a CUDA graph, in bf16:\n\n"
    names = {
        "neither": "neither conditions nor tokens",
        "conditions": "two conditions",
        "tokens": "16 tokens",
        "both": "both",
    }
    lines = []
    for peer, name in names.items():
        cells = []
        for column in ("median_ms", "gpu_ms"):
            value, least = found.number(column, peer), found.number(column, "neither")
            cells.append(_ms(value) + (f" ({value / least:.2f}×)" if value and least and peer != "neither" else ""))
        lines.append([name, *cells])
    return text + table(["network", "wall-clock time", "of the GPU"], lines)


STEPS = "Times are wall-clock times of steps that follow each other, with the time of the GPU alone in parentheses.\n"
TABLES: dict[str, Callable[[Path], str]] = {
    "short": short,
    "training-step": partial(in_every_dtype, "Training step", "steps", "train-step"),
    "inference": partial(in_every_dtype, "Inference", "inference", "inference"),
    "float32": float32,
    "compiled": partial(in_every_dtype, "Training step, compiled", "compiled", "train-step", gpu=False),
    "training-loop": training_loop,
    "command": command,
    "conditions": conditions,
    "operations": operations,
    "sparse": sparse,
    "tasks": tasks,
    "maps": maps,
    "matching": matching,
}


def measured(name: str, results: Path = LOOPS) -> str:
    """A table of `TABLES`. Raises KeyError for an unknown one."""
    return TABLES[name](results)


def of_robustness(file: str) -> str:
    """The results of `diffnet robustness` in a file, by its path relative to docs/."""
    return robustness_table(json.loads((CHECKOUT / "docs" / file).read_text("utf-8")))


def robustness_table(results: dict[str, Any]) -> str:
    """The rows of results.json as a table in Markdown.

    >>> row = {"change": "mirrored", "kept": 0.98, "accuracy_before": 0.94, "accuracy": 0.945, "error": None}
    >>> print(robustness_table({"accuracy": 0.94, "rows": [row]}))
    | change | predictions kept | accuracy before | accuracy |
    |---|---|---|---|
    | none | 100.0 % | 94.0 % | 94.0 % |
    | mirrored | 98.0 % | 94.0 % | 94.5 % |
    <BLANKLINE>
    """
    unchanged = percent(results["accuracy"])
    lines = [["none", percent(1.0), unchanged, unchanged]]
    for row in results["rows"]:
        if row["error"] is None:
            cells = [percent(row[name]) for name in ("kept", "accuracy_before", "accuracy")]
        else:
            cells = [f"not measured: {row['error'].replace('|', '/')}", "", ""]
        lines.append([row["change"], *cells])
    return table(["change", "predictions kept", "accuracy before", "accuracy"], lines)


# For each page, a function that makes a table from its name.
PAGES: dict[str, Callable[[str], str]] = {
    "README.md": measured,
    "docs/measurements.md": measured,
    "docs/robustness.md": of_robustness,
}


def _by_size(found: Results, dtype: str, peers: dict[str, str], gpu: bool = False) -> str:
    """A row per number of vertices, a column per peer. `gpu`: with the time of the GPU in parentheses."""
    lines = []
    for v in found.values("vertices"):
        case = {"dtype": dtype, "vertices": v}
        cells = []
        for peer in peers.values():
            alone = found.number("gpu_ms", peer, **case) if gpu else None
            cells.append(_ms(found.ms(peer, **case)) + ("" if alone is None else f" ({_digits(alone)})"))
        lines.append([f"{int(v):,}", *cells])
    return table(["vertices", *(f"`{name}`" if name == peer else name for name, peer in peers.items())], lines)


def _time_and_memory(found: Results, peer: str, **case: str) -> str:
    return f"{_ms(found.ms(peer, **case))}, {_gib(found.number('peak_mb', peer, **case))}"


def _share(found: Results, peer: str, **case: str) -> str:
    share = found.number("floor_share", peer, **case)
    return "not measured" if share is None else f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{_digits(value)} ms"


def _seconds(ms: float | None) -> str:
    return "not measured" if ms is None else f"{ms / 1e3:.1f} s"


def _gib(mb: float | None) -> str:
    return "not measured" if mb is None else f"{mb / 2**10:.2f} GiB"


def main() -> None:
    """Write the tables into the pages, and print the names of the pages that change."""
    for name, make in PAGES.items():
        path = CHECKOUT / name
        before = path.read_text(encoding="utf-8")
        after = updated(before, make)
        if after != before:
            path.write_text(after, encoding="utf-8")
        print(f"{name}: {'unchanged' if after == before else 'updated'}")


if __name__ == "__main__":
    main()
