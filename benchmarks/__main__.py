"""`python -m diffnet.benchmarks NAME…`, in a checkout. This loads PyTorch where a benchmark runs, not for `--list`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffnet.geometry.errors import OptionError
from diffnet.train.console import complain, console, user_message

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="Benchmarks to run, or all. The benchmark command needs --data."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the benchmarks.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.csv, NAME.png and run.json.")] = None,
    vertices: Annotated[str | None, typer.Option(help="Numbers of vertices, for example 1000,10000.")] = None,
    widths: Annotated[str | None, typer.Option(help="Numbers of channels, for example 64,128.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Number of eigenpairs.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="Any of fp32, tf32, bf16 and fp16, for example bf16,tf32.")] = None,
    peers: Annotated[str | None, typer.Option(help="Measure only these peers, for example plain,diffnet.")] = None,
    meshes: Annotated[
        Path | None, typer.Option(help="Folder of meshes for preprocessing. By default, meshes are generated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of labeled meshes for the benchmark command, see diffnet train.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time to measure each case for.")] = 1.0,
    flush: Annotated[bool, typer.Option(help="Empty the GPU's L2 cache before each run.")] = True,
    compile: Annotated[bool, typer.Option(help="Also measure each peer under torch.compile.")] = True,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Measure speed and memory against peers, side by side in one run.

    Each benchmark has default sizes. The exit code is 1 if a peer gives an error. A peer that is not available here,
    or needs too much memory, gets a row that says so.
    """
    from diffnet.benchmarks.catalog import list_benchmarks

    if show or not names:
        list_benchmarks(console)
        return
    from diffnet.benchmarks import BENCHMARKS, Options
    from diffnet.benchmarks.harness.run import check_names, run_benchmarks
    from diffnet.train.device import pick_device

    if names == ["all"]:
        names = [name for name in sorted(BENCHMARKS) if name != "command" or data is not None]
    check_names(names)
    if out is None:
        raise OptionError("--out should name a folder for the results")
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
        data=data,
    )
    broken = run_benchmarks(names, options, out, console)
    for line in broken:
        complain(line)
    if broken:
        raise typer.Exit(1)


def _integers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    values = text.replace("_", "").split(",")
    if not all(v.strip().isdecimal() and int(v) > 0 for v in values):
        raise OptionError(f"{option} should be positive integers separated by commas, got {text!r}")
    return tuple(int(v) for v in values)


def main() -> None:
    """Run the command. An error that the user can fix prints one line on stderr, and the exit code is 1."""
    try:
        app()
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        complain(message)
        sys.exit(1)


if __name__ == "__main__":
    main()
