"""Results as a table with one row per peer and case, and the record of a run."""

from __future__ import annotations

import csv
import io
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from diffnet import __version__
from diffnet.benchmarks.harness.registry import Case, Options
from diffnet.benchmarks.harness.timing import Failure, Measurement
from diffnet.data import available_cores
from diffnet.geometry.files import write_atomically

Row = dict[str, str | int | float | None]

# These columns follow the parameters of the benchmark. tflops counts the operations of the direct form,
# executed_tflops the operations that the peer computes. peak_mb is in units of 2²⁰ bytes. gpu_ms explains a wall-clock
# time: it is the time of the GPU alone. floor_share is the floor's share of the time, and design_share that of
# `Case.design_ms`.
COLUMNS = (
    "peer",
    "median_ms",
    "q1_ms",
    "q3_ms",
    "runs",
    "gpu_ms",
    "peak_mb",
    "tflops",
    "executed_tflops",
    "gbps",
    "floor_ms",
    "floor_share",
    "design_share",
    "error",
)


def rows(case: Case, found: dict[str, Measurement | Failure]) -> list[Row]:
    """The rows of a case's results, one per peer."""
    return [{**case.parameters, **_numbers(case, peer, result)} for peer, result in found.items()]


def _numbers(case: Case, peer: str, result: Measurement | Failure) -> Row:
    row: Row = dict.fromkeys((*COLUMNS, *case.details))
    row.update(peer=peer, floor_ms=_short(case.floor_ms))
    if isinstance(result, Failure):
        row["error"] = result.reason
        return row
    times = [ms * case.times.get(peer, 1) for ms in result.milliseconds]
    ms = median(times)
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (ms, ms, ms)
    executed, design_ms = case.executed_flops.get(peer, case.flops), case.design_ms(peer)
    row.update(
        median_ms=_short(ms),
        q1_ms=_short(low),
        q3_ms=_short(high),
        runs=len(times),
        gpu_ms=_short(result.gpu_ms),
        peak_mb=_short(result.peak_mb),
        tflops=_short(case.flops and case.flops / ms / 1e9),
        executed_tflops=_short(executed and executed / ms / 1e9),
        gbps=_short(case.bytes and case.bytes / ms / 1e6),
        floor_share=_short(case.floor_ms and case.floor_ms / ms),
        design_share=_short(design_ms and design_ms / ms),
        **result.details,
    )
    return row


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def write_csv(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that all have the columns of the first one."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_atomically(path, text.getvalue())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; every value is text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_run(path: Path, names: Sequence[str], options: Options) -> None:
    """Record the benchmarks, the date, the command, the device, the versions and the options."""
    device = options.device
    run: dict[str, Any] = {
        "benchmarks": list(names),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "diffnet.benchmarks", *sys.argv[1:]],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "versions": {
            "diffnet": __version__,
            "torch": torch.__version__,
            "triton": _installed_version("triton"),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "options": {
            **asdict(options),
            "device": str(device),
            "meshes": _text(options.meshes),
            "data": _text(options.data),
        },
    }
    write_atomically(path, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
