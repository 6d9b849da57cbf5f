"""The names of all benchmarks, read from their source, because importing them would load PyTorch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDERS = ("cases", "loops")

# The peers of the benchmarks in `loops`.
PEERS = {
    "original": "the original's form: float32 or tf32, sparse gradients, one mesh after another",
    "plain": "the definition of a block in plain PyTorch",
    "diffnet": "our kernels, launched one by one, in a loop as in the README",
    "diffnet-graphed": "the same with diffnet.graphed, and PyTorch's Adam",
    "diffnet-graphed-fused": "the same with Adam(fused=True)",
    "diffnet-step": "a loop with diffnet.GraphedStep, and PyTorch's loss and Adam",
    "diffnet-step-own-loss": "the same with a loss of the user, which runs between two graphs",
    "diffnet-captured": "one CUDA graph of the whole step for each mesh",
    "diffnet-command": "the step of diffnet train, with graphs for batches of any size",
    "diffnet-cpu": "on the CPU: diffnet, by default",
    "matrix-products": "on the CPU: the dense matrix products of the loop alone",
    "…-compiled": "the same under torch.compile; --no-compile leaves these out",
}


@dataclass(frozen=True)
class Entry:
    """The description of a benchmark, read without importing it. See `Benchmark`."""

    name: str
    summary: str
    metrics: tuple[str, ...]


def catalog() -> dict[str, Entry]:
    """All benchmarks, sorted by name: the functions with the decorator `@benchmark`."""
    entries = [entry for path in modules().values() for entry in _entries(path)]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def modules() -> dict[str, Path]:
    """The modules that may hold benchmarks, with their files."""
    files = [path for folder in FOLDERS for path in sorted((Path(__file__).parent / folder).glob("[!_]*.py"))]
    return {f"diffnet.benchmarks.{path.parent.name}.{path.stem}": path for path in files}


def _entries(path: Path) -> list[Entry]:
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "benchmark":
                assert isinstance(node, ast.FunctionDef)
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                summary = (ast.get_docstring(node) or "").split("\n")[0]
                found.append(Entry(ast.literal_eval(call.args[0]), summary, given.get("metrics", ("ms",))))
    return found


def list_benchmarks(console: Console) -> None:
    """Print the names, summaries and metrics of all benchmarks, and the peers of whole networks."""
    table = Table("benchmark", "measures", "plots")
    for entry in catalog().values():
        table.add_row(entry.name, entry.summary, ", ".join(entry.metrics))
    console.print(table)
    peers = Table("peer", "of inference, train-step and training-loop")
    for name, meaning in PEERS.items():
        peers.add_row(name, meaning)
    console.print(peers)
