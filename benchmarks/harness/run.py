"""Runs benchmarks and writes their results into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from diffnet.benchmarks.harness.plots import plot
from diffnet.benchmarks.harness.registry import BENCHMARKS, Benchmark, Case, Options
from diffnet.benchmarks.harness.results import Row, rows, write_csv, write_run
from diffnet.benchmarks.harness.timing import Failure, measure, run_once
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import make_folder


def run_benchmarks(names: Sequence[str], options: Options, out: Path, console: Console) -> list[str]:
    """Run benchmarks, and write NAME.csv and NAME.png for each of them and run.json into the folder `out`.

    Returns one line for each broken peer. Peers that can't run on this machine are not broken.
    Raises OptionError for an unknown benchmark or peer.
    """
    check_names(names)
    make_folder(out)
    write_run(out / "run.json", names, options)
    broken: list[str] = []
    for name in names:
        broken += _run(BENCHMARKS[name], options, out, console)
    return broken


def check_names(names: Sequence[str]) -> None:
    """Raises OptionError for an unknown benchmark."""
    for name in names:
        if name not in BENCHMARKS:
            raise OptionError(f"no benchmark is called {name!r}; there are {', '.join(sorted(BENCHMARKS))}")


def _run(bench: Benchmark, options: Options, out: Path, console: Console) -> list[str]:
    table: list[Row] = []
    broken: list[str] = []
    csv_path = out / f"{bench.name}.csv"
    for case in bench.cases(options):
        chosen = _choose(case, options)
        if options.device.type != "cuda":  # the floor is that of a GPU
            chosen = replace(chosen, kind=None)
        if chosen.details:
            found = run_once(chosen.peers, chosen.details)
        else:
            found = measure(
                chosen.peers,
                options.device,
                seconds=options.seconds,
                flush=options.flush,
                wall_clock=chosen.wall_clock,
                calls=chosen.calls,
                warm_up=chosen.warm_up,
            )
        new = rows(chosen, found)
        table += new
        write_csv(csv_path, table)  # after every case, so an interrupted run keeps its results
        label = ", ".join(f"{name} {value}" for name, value in case.parameters.items())
        for row in new:
            console.print(f"{bench.name}  {label}  {_line(row)}", soft_wrap=True)
        broken += [
            f"{bench.name}, {label}, {peer}: {result.reason}"
            for peer, result in found.items()
            if isinstance(result, Failure) and not result.expected
        ]
    if table:
        plot(bench, csv_path, out / f"{bench.name}.png")
    return broken


def _choose(case: Case, options: Options) -> Case:
    """The case with only the peers that the options name. Raises ValueError for an unknown peer."""
    if options.peers is None:
        return case
    chosen: list[str] = []
    rest = options.peers.strip()
    while rest or not chosen:
        # A name may contain commas itself, so take the longest name that fits.
        fitting = [peer for peer in case.peers if f"{rest},".startswith(f"{peer},")]
        if not fitting:
            raise OptionError(f"no peer is called {rest.split(',')[0]!r}; there are {'; '.join(case.peers)}")
        chosen.append(max(fitting, key=len))
        rest = rest[len(chosen[-1]) + 1 :].lstrip()
    return replace(case, peers={peer: case.peers[peer] for peer in chosen})


def _line(row: Row) -> str:
    if row["error"]:
        return f"{row['peer']}: {row['error']}"
    parts = [f"{row['peer']}: {row['median_ms']} ms"]
    if row["gpu_ms"] is not None:
        parts.append(f"{row['gpu_ms']} ms of the GPU")
    if row["floor_share"] is not None:
        parts.append(f"{100 * float(row['floor_share']):.0f} % of the floor")
    if row["design_share"] is not None:
        parts.append(f"{100 * float(row['design_share']):.0f} % of the floor of its design")
    if row["peak_mb"] is not None:
        parts.append(f"{row['peak_mb']} MB")
    return ", ".join(parts)
