"""The whole command line, `diffnet` or `python -m diffnet`: what `diffnet.train.cli` offers, and benchmarks.

This stands above all rooms, and nothing imports it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diffnet.train import cli
from diffnet.train.cli import DeviceOption, app, console
from diffnet.train.options import pick_device

__all__ = ["main"]


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Benchmarks, or all.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.csv, NAME.png and run.json.")] = None,
    vertices: Annotated[str | None, typer.Option(help="Sizes to measure, as 1000,10000.")] = None,
    widths: Annotated[str | None, typer.Option(help="Channels to measure, as 64,128.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Eigenpairs.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Among fp32, tf32, bf16 and fp16, as bf16,tf32.")] = None,
    peers: Annotated[str | None, typer.Option(help="Measure these only, as plain,triton.")] = None,
    meshes: Annotated[Path | None, typer.Option(help="Folder of meshes for preprocessing; else generated.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time to spend on measuring each case.")] = 1.0,
    flush: Annotated[bool, typer.Option(help="Empty the GPU's L2 cache before each run.")] = True,
    compile: Annotated[bool, typer.Option(help="Also measure what torch.compile makes of the peers.")] = True,
    device: DeviceOption = "auto",
) -> None:
    """Measure speed and memory against peers, side by side in one run.

    Sizes that are not given are each benchmark's own. The exit code is 1 where a peer is broken; one that can't run
    here, or not in the memory there is, has a row that says so.
    """
    from diffnet.benchmarks import BENCHMARKS, Options
    from diffnet.benchmarks.harness.run import list_benchmarks, run_benchmarks

    if show or not names:
        list_benchmarks(console)
        return
    if out is None:
        raise ValueError("--out should name a folder for the results")
    options = Options(
        pick_device(device),
        vertices=_integers("--vertices", vertices),
        widths=_integers("--widths", widths),
        k=k,
        dtypes=None if dtypes is None else tuple(dtypes.split(",")),
        peers=peers,
        seconds=seconds,
        flush=flush,
        compile=compile,
        meshes=meshes,
    )
    broken = run_benchmarks(sorted(BENCHMARKS) if names == ["all"] else names, options, out, console)
    for line in broken:
        typer.echo(f"diffnet: {line}", err=True)
    if broken:
        raise typer.Exit(1)


def _integers(option: str, given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    values = given.replace("_", "").split(",")
    if not all(v.strip().isdecimal() and int(v) > 0 for v in values):
        raise ValueError(f"{option} should be positive integers with commas between, got {given!r}")
    return tuple(int(v) for v in values)


def main() -> None:
    """Run the command line, see `diffnet.train.cli.main`."""
    script = sys.modules["__main__"]
    if script.__spec__ is None:
        # Processes that preprocess meshes import the script that starts them, and this one loads PyTorch. Of one that
        # was started as `python -m diffnet` they know that they needn't.
        script.__spec__ = find_spec("diffnet.__main__")
    cli.main()


if __name__ == "__main__":
    main()
