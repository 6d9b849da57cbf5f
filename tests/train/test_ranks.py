"""Several ranks, as processes that talk through a store: `diffnet precompute` under torchrun, and `train/ranks.py`."""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, diffnet
from copies import ends_of_copies
from two_ranks import command_under_torchrun, ended, run_ranks, torchrun, two_machines, wait_for

from diffnet.geometry.errors import OptionError
from diffnet.geometry.processes import available_cores
from diffnet.train.device import pick_device
from diffnet.train.place import Place, place
from diffnet.train.ranks import RankError, connected

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

BAD = "OFF\n1 1 0\n0 0 0\n3 0 1 2\n"
# On a busy machine, one rank can start seconds after the other.
SHORT = "from diffnet.train import ranks\nranks.TIMEOUT, ranks.BEAT = 8.0, 0.2\n"


def write_balls(folder: Path, count: int, subdivisions: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(count):
        ball = trimesh.creation.icosphere(subdivisions)
        ball.vertices *= np.random.default_rng(i).uniform(0.6, 1.4, 3)
        ball.export(folder / f"{i:02}.off")
    return folder


def entries(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.operators.*")}


def arrays_of(cache: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of all arrays of all entries. The order of names in the headers is random."""
    from safetensors.numpy import load_file

    paths = cache.rglob("*.safetensors")
    return {path.name: {name: array.tobytes() for name, array in load_file(path).items()} for path in paths}


# ---- diffnet precompute ----


def test_ranks_share_meshes_and_list_failures_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_balls(tmp_path / "data", 6)
    for name in ("0-a.off", "0-b.off", "03c.off"):  # each rank takes one of the first two
        (data / name).write_text(BAD)
    options = ["--k", 8, "--verbose"]
    code, _, err = diffnet("precompute", data, "--cache", tmp_path / "one", "--jobs", 2, *options)
    assert code == 1
    assert len(err.splitlines()) == 3
    shared = ["precompute", data, "--cache", tmp_path / "two", *options]
    assert ends_of_copies(command_under_torchrun, [shared]) == [1]
    printed, complaints = capfd.readouterr()
    assert [line for line in complaints.splitlines() if line.startswith("diffnet: ")] == err.splitlines()
    assert re.findall(r"exit code: (\S+)", printed) == ["1", "1"]
    assert f"6 of 9 meshes are in {tmp_path / 'two'}" in printed.replace("\n", " ")
    assert printed.count("meshes are in") == printed.count("9/9") == printed.count("added up over") == 1
    assert "solve" in printed
    assert arrays_of(tmp_path / "two") == arrays_of(tmp_path / "one")


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_next_run_computes_the_rest(tmp_path: Path) -> None:
    data, cache = write_balls(tmp_path / "data", 12, 4), tmp_path / "cache"
    script = tmp_path / "command.py"
    script.write_text(f"{SHORT}from diffnet.__main__ import main\nif __name__ == '__main__':\n    main()\n")
    command = ["precompute", data, "--cache", cache, "--k", 16]
    with two_machines(script, *command) as (first, second):
        wait_for(lambda: len(entries(cache)) >= 2)
        second.kill()
        killed = time.monotonic()
        _, err = first.communicate(timeout=60)
        assert time.monotonic() - killed < 40
    name = re.escape(f"(on {socket.gethostname()})")
    message = f"diffnet: rank 1 {name} of 2 missing: no sign of life for 8 s. The cache keeps complete meshes, .*\n"
    assert re.fullmatch(message, err), err
    assert first.returncode == 1
    before = entries(cache)
    assert 2 <= len(before) < 12
    with two_machines(script, *command) as processes:
        (code, out, err), other = ended(processes)
    assert (code, err) == (0, "")
    assert "12 of 12 meshes are in" in out.replace("\n", " ")
    assert other == (0, "", "")
    after = entries(cache)
    assert len(after) == 12
    assert after.items() >= before.items()


# ---- what ranks tell another ----

WORK = """
import os, sys, threading, time
{modules}
{short}
from diffnet.geometry.errors import OptionError
from diffnet.interrupts import raise_at_sigterm
from diffnet.train.console import complain
if __name__ == "__main__":
    raise_at_sigterm()
    rank = int(os.environ["RANK"])
    try:
        {begin}
            {work}
    except ranks.RankError as e:
        complain(str(e))
        sys.exit(1)
"""


def script(folder: Path, work: str, begin: str = "with ranks.connected() as team:", modules: str = "") -> Path:
    path = folder / "work.py"
    path.write_text(WORK.format(short=SHORT, modules=modules, begin=begin, work=work.replace("\n", "\n            ")))
    return path


def share(rank: int, folder: Path) -> None:
    big = base64.b64encode(os.urandom(9 << 20)).decode()  # more than a store takes at once, compressed, too
    mine = []
    with connected() as team:
        assert len(team.shared(lambda: big)) == len(big)
        for number in team.handed_out(40):
            mine.append(number)
            time.sleep(0.01 + 0.05 * rank)
        found = team.gathered([rank, mine, chr(0xDC80)])
    (folder / str(rank)).write_bytes(pickle.dumps(found))


def test_values_and_numbers_are_shared(tmp_path: Path) -> None:
    run_ranks(share, tmp_path)
    every, other = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2))
    assert every == other
    (_, first, odd), (_, second, _) = every
    assert odd == "\udc80"
    assert sorted([*first, *second]) == list(range(40))
    assert len(first) > 2 * len(second) > 0  # the idle rank takes more


def fail(rank: int, failing: int, folder: Path) -> None:
    try:
        with connected():
            if rank == failing:
                raise OptionError("no such thing")
            time.sleep(60)
    except (OptionError, RankError) as e:
        (folder / str(rank)).write_text(repr(e))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_ends_all_ranks_with_its_reason(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.train.ranks.BEAT", 0.2)
    run_ranks(fail, rank, tmp_path)
    assert (tmp_path / str(rank)).read_text() == "OptionError('no such thing')"
    assert (tmp_path / str(1 - rank)).read_text() == f"RankError('rank {rank}: no such thing')"


@pytest.mark.slow
def test_the_end_of_rank_0_is_noticed(tmp_path: Path) -> None:
    """The store is in rank 0 here. It ends with the process, and doesn't answer while the process is stopped."""
    with two_machines(script(tmp_path, "print('started', flush=True)\ntime.sleep(60)")) as (first, second):
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        (found,) = ended([second])
    lost = "diffnet: rank 1 has lost the store on localhost: rank 0 or its machine has ended\n"
    assert (found[0], found[2].endswith(lost)) == (1, True), found
    work = "print('started', flush=True)\nteam.gathered(1) if rank else time.sleep(60)"
    with two_machines(script(tmp_path, work), TORCH_CPP_LOG_LEVEL="ERROR") as (first, second):
        assert first.stdout is not None
        first.stdout.readline()
        first.send_signal(signal.SIGSTOP)
        (found,) = ended([second])
    assert (found[0], found[2].endswith(lost)) == (1, True), found


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    for missing, message in (
        (1, "rank 1 of 2 missing: no sign of life for 8 s"),
        (0, "rank 1 finds no store of rank 0 on localhost, port [0-9]+: .*timed out.*"),
    ):
        with two_machines(script(tmp_path, "pass"), TORCH_CPP_LOG_LEVEL="FATAL") as processes:
            processes[missing].kill()
            ((code, _, err),) = ended([processes[1 - missing]])
        assert code == 1
        assert re.fullmatch(f"diffnet: {message}\n", err.splitlines(keepends=True)[-1]), err


@pytest.mark.slow
def test_torchrun_that_stops_a_rank_finds_out_why(tmp_path: Path) -> None:
    work = "if rank:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    ran = torchrun(script(tmp_path, work))
    assert ran.returncode == 1
    assert re.search(r"^diffnet: rank 1 .*of 2 missing", ran.stderr, re.MULTILINE), ran.stderr


@pytest.mark.slow
def test_ranks_that_have_done_their_work_keep_their_exit_code(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to all ranks when the first of them ends with an error."""
    path = script(tmp_path, "pass")
    path.write_text(f"{path.read_text()}    time.sleep(2 - 2 * rank)\n    sys.exit(3)\n")
    ran = torchrun(path)
    assert re.findall(r"exitcode +: (\S+)", ran.stderr) == ["3", "3"], ran.stderr


@pytest.mark.slow
def test_a_collective_operation_names_the_rank_that_failed(tmp_path: Path) -> None:
    work = (
        "for step in range(100):\n"
        "    total = torch.ones(2) * (rank + 1)\n"
        "    torch.distributed.all_reduce(total)\n"
        "    assert total.tolist() == [3, 3]\n"
        "    if rank == 1 and step == 3:\n"
        "        {end}\n"
    )
    group = "with ranks.connected() as team, ranks.process_group(team, torch.device('cpu')):"
    cases = {
        "os.kill(os.getpid(), 9)": "rank 1 .* of 2 missing: no sign of life for .*",
        "raise OptionError('no such thing')": "rank 1: no such thing",
        "break": "",
    }
    for end, message in cases.items():
        with two_machines(script(tmp_path, work.format(end=end), group, "import torch")) as processes:
            (code, _, err), _ = ended(processes)
        expected = re.fullmatch(f"diffnet: {message}\n", err)
        assert (code, bool(expected)) == (1, True) if message else True, err


# ---- the place of a process ----


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert place() == Place(0, 1, 0, 1)
    cores = available_cores()
    with connected() as ranks:
        assert ranks.is_alone
        assert ranks.is_first
        assert (ranks.shared(lambda: 3), ranks.gathered(4)) == (3, [4])
    monkeypatch.setenv("RANK", "3")
    assert place().world_size == 1  # other programs set RANK, too
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert place() == Place(3, 4, 0, 1)
    with pytest.raises(OptionError, match="MASTER_ADDR and MASTER_PORT should be the address"), connected():
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert place() == Place(3, 4, 1, 2)
    assert available_cores() == max(1, cores // 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:1")
    assert current == [1, 1]
    assert pick_device("cuda:0") == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OptionError, match="rank 3 has no GPU of its own, because this machine has 1 for 2 ranks"):
        pick_device("auto")
    for name, value, message in (
        ("WORLD_SIZE", "3", "WORLD_SIZE should be above the number of the rank, 3, got 3"),
        ("LOCAL_RANK", "x", "LOCAL_RANK should be an integer from 0, got 'x'"),
    ):
        monkeypatch.setenv(name, value)
        assert message in complaint("precompute", "x.off")
        monkeypatch.setenv("WORLD_SIZE", "4")
