"""Processes that work together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from command import diffnet
from copies import ends_of_copies

from diffnet.__main__ import main


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("localhost", 0))
        return int(at.getsockname()[1])


def environment(**more: object) -> dict[str, str]:
    path = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **{name: str(v) for name, v in more.items()}}


def torchrun(*arguments: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run ranks on this machine. `arguments` follow those of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += map(str, arguments)
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


def command_under_torchrun(*arguments: object, ranks: int = 2) -> None:
    """What `torchrun -m diffnet` does, with copies of this process as ranks. They print their exit codes.

    Call this in a copy, too, because torchrun replaces the handlers of signals.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # takes a while to load

    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
    config = LaunchConfig(1, 1, ranks, **place, max_restarts=0, start_method="fork")
    elastic_launch(config, _as_command)(*map(str, arguments))


def _as_command(*arguments: str) -> None:
    sys.argv = sys.orig_argv = ["diffnet", *arguments]
    try:
        main()
    except SystemExit as end:
        print(f"exit code: {end.code}\n", end="")
        raise


@contextmanager
def two_machines(*command: object, **more: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that no torchrun watches, as if each were on its own machine."""
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=port, **more),
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    return [(code, out, err) for out, err, code in found]


def run_ranks(work: Callable[..., None], *arguments: object, count: int = 2) -> None:
    """Call work(rank, *arguments) in copies of this process with the variables that torchrun sets."""
    port = free_port()
    ends = ends_of_copies(_as_rank, [(rank, count, port, work, arguments) for rank in range(count)])
    assert ends == [0] * count


def _as_rank(rank: int, count: int, port: int, work: Callable[..., None], arguments: Sequence[object]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in places.items()}}
    work(rank, *arguments)


def commands_of_ranks(
    folder: Path, commands: Sequence[Sequence[object]], count: int = 2
) -> list[list[tuple[int, str, str]]]:
    """Run commands of diffnet one after another in several ranks. In paths, RANK is the number of the rank.

    Returns for each rank the exit code, stdout and stderr of each command.
    """
    run_ranks(_run_commands, folder, [[str(argument) for argument in command] for command in commands], count=count)
    return [[tuple(one) for one in json.loads((folder / f"rank {rank}.json").read_text())] for rank in range(count)]


def _run_commands(rank: int, folder: Path, commands: Sequence[Sequence[str]]) -> None:
    found = [diffnet(*(word.replace("RANK", str(rank)) for word in command)) for command in commands]
    (folder / f"rank {rank}.json").write_text(json.dumps(found))
