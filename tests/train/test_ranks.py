"""Several ranks, as processes that talk through a store: the commands under torchrun, and `train/ranks.py`."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import complaint, diffnet
from copies import ends_of_copies
from runs import ball, results_of, table_of, write_ball, write_balls
from two_ranks import command_under_torchrun, commands_of_ranks, ended, run_ranks, torchrun, two_machines, wait_for

from diffnet import DiffusionNet
from diffnet.geometry.errors import OptionError
from diffnet.geometry.processes import available_cores
from diffnet.train import cli, epoch, loop, ranks, run
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.device import pick_device
from diffnet.train.place import Place, place
from diffnet.train.ranks import RankError, connected

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals"),
    pytest.mark.usefixtures("one_thread", "small_pictures"),
]

BAD = "OFF\n1 1 0\n0 0 0\n3 0 1 2\n"
# On a busy machine, one rank can start seconds after the other.
SHORT = "from diffnet.train import ranks\nranks.TIMEOUT, ranks.BEAT = 8.0, 0.2\n"


def entries(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.operators.*")}


def arrays_of(cache: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of all arrays of all entries. The order of names in the headers is random."""
    from safetensors.numpy import load_file

    paths = cache.rglob("*.safetensors")
    return {path.name: {name: array.tobytes() for name, array in load_file(path).items()} for path in paths}


# ---- diffnet precompute ----


def test_ranks_share_meshes_and_list_failures_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_balls(tmp_path / "data", 6, ".off", labeled=False)
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
    data, cache = write_balls(tmp_path / "data", 12, ".off", 4, labeled=False), tmp_path / "cache"
    script = tmp_path / "command.py"
    script.write_text(f"{SHORT}from diffnet.__main__ import main\nif __name__ == '__main__':\n    main()\n")
    command = ["precompute", data, "--cache", cache, "--k", 16]
    with two_machines(script, *command) as (first, second):
        wait_for(lambda: len(entries(cache)) >= 2)
        os.killpg(second.pid, signal.SIGKILL)  # with its workers, which would complete the meshes that they have
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
    assert diffnet("precompute", data, "--cache", tmp_path / "whole", "--k", 16, "--jobs", 2)[0] == 0
    assert arrays_of(cache) == arrays_of(tmp_path / "whole")  # no entry is damaged


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
    waits, asks = "time.sleep(60)", "team.gathered(1) if rank else time.sleep(60)"
    lost = "diffnet: rank 1 has lost the store on localhost: rank 0 or its machine has ended\n"
    for work, end, level in ((waits, signal.SIGKILL, "WARNING"), (asks, signal.SIGSTOP, "ERROR")):
        path = script(tmp_path, f"print('started', flush=True)\n{work}")
        with two_machines(path, TORCH_CPP_LOG_LEVEL=level) as (first, second):
            assert first.stdout is not None
            first.stdout.readline()
            first.send_signal(end)
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


# ---- train, evaluate and predict in several ranks give what one process gives ----


def files_of(folder: Path) -> dict[str, object]:
    """The content of all files. Rows of a report are without times."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith("report.csv"):
            found[path.name] = [(row["file"], row["status"], row["reason"]) for row in table_of(path)]
        else:
            found[path.name] = path.read_bytes()
    return found


SMALL = ("--jobs", 1, "--k", 6, "--width", 8, "--blocks", 1, "--epochs", 2, "--eval-every", 1, "--dropout", 0)
SMALL = (*SMALL, "--schedule", "step")


def write_set(root: Path) -> Path:
    """Seven balls to train on and two to test on: with labels of vertices, in folders of classes, and as pairs."""
    for seed in range(9):
        size, part, verts = 1 + seed % 2, "train" if seed < 7 else "test", ball(seed, 1 + seed % 2).vertices
        write_ball(root / ("cat", "dog")[seed % 2] / part / f"m{seed}.ply", seed, size)
        labeled = write_ball(root / "labels" / part / f"m{seed}.ply", seed, size)
        np.savetxt(labeled.with_suffix(".txt"), np.where(verts[:, 1] > 0.4, -1, verts[:, 0] > 0), fmt="%d")
        if seed % 2 == 0:
            paired = write_ball(root / "pairs" / ("train" if seed < 6 else "test") / f"m{seed}.ply", seed, size)
            np.savetxt(paired.with_suffix(".vts"), np.arange(len(verts)), fmt="%d")
    return root


def metrics(out: Path) -> list[list[float]]:
    rows = table_of(out / "metrics.csv")
    return [[float(value or 0) for name, value in row.items() if name != "seconds"] for row in rows]


def results(out: Path) -> Any:
    found = results_of(out)
    return {name: value for name, value in found.items() if name not in ("date", "cores")}


@pytest.mark.usefixtures("addresses")
def test_training_and_evaluation(tmp_path: Path) -> None:
    """Batches of three: the last one has one mesh, so one of the ranks has none. Two meshes can't be used."""
    data = write_set(tmp_path / "set")
    labels, pairs = ((data / name).rename(tmp_path / name) for name in ("labels", "pairs"))
    for name, vertex in (("damaged", "v 0 zero 0\n"), ("flat", "v 0 0 0\n")):
        (labels / "test" / f"{name}.obj").write_text(3 * vertex + "f 1 2 3\n")
        (labels / "test" / f"{name}.txt").write_text("0\n0\n1\n")
    same = ["--cache", tmp_path / "cache", "--skip-unusable", *SMALL, "--batch-meshes", 3]
    weighted = ["--loss", "focal", "--class-weights", "balanced"]
    trainings: dict[str, list[object]] = {
        "labels": ["segmentation", "--data", labels, "--features", "xyz+normals", "--mirror", *weighted],
        "classes": ["classification", "--data", data, "--validation", 0.2],
        "pairs": ["correspondence", "--data", pairs, "--map-k", 5, "--channels", 8, "--batch-pairs", 5],
        "tuned": ["segmentation", "--data", labels, "--from", tmp_path / "one" / "labels", "--freeze", "blocks"],
    }

    def commands(out: Path) -> list[list[object]]:
        every = [
            ["train", *own, *(same[:-2] if "--batch-pairs" in own else same), "--out", out / name]
            for name, own in trainings.items()
        ]
        scored = ["--checkpoint", tmp_path / "one" / "labels" / "last.pt", "--cache", tmp_path / "cache"]
        scored += ["--skip-unusable"]
        return [*every, ["evaluate", "--data", labels, *scored, "--out", out / "scores"]]

    one = [diffnet(*command) for command in commands(tmp_path / "one")]
    assert [(code, err) for code, _, err in one] == [(0, "")] * 5
    train = ["train", *trainings["labels"], *same]
    more = [
        [*train, "--epochs", 1, "--out", tmp_path / "begun"],
        [*train, "--batch-meshes", 1, "--out", tmp_path / "refused"],
        [*train, "--loss", "dice", "--out", tmp_path / "refused"],
        [tmp_path / "missing" if each is labels else each for each in (*train, "--out", tmp_path / "refused")],
    ]
    first, second = commands_of_ranks(tmp_path, [*commands(tmp_path / "two"), *more])
    assert [(code, err) for code, _, err in first[:6]] == [(0, "")] * 6, first
    assert second[:6] == [(0, "", "")] * 6
    for name in trainings:
        np.testing.assert_allclose(metrics(tmp_path / "two" / name), metrics(tmp_path / "one" / name), rtol=1e-4)
        files = [{path.name for path in (tmp_path / out / name).iterdir()} for out in ("one", "two")]
        assert files[0] == files[1]
    assert results(tmp_path / "two" / "scores") == results(tmp_path / "one" / "scores")
    assert len(results(tmp_path / "two" / "scores")["left_out"]) == 2
    assert "--batch-meshes should be at least 2, one mesh for each rank, got 1" in first[6][2]
    assert first[6][1] == ""  # no data were read
    assert "is dice, which is no mean over elements" in first[7][2]
    assert "missing: no such file or folder" in first[8][2]
    assert second[6:] == [(1, "", "")] * 3
    # One rank goes on.
    assert diffnet(*train, "--resume", "--out", tmp_path / "begun")[::2] == (0, "")
    np.testing.assert_allclose(metrics(tmp_path / "begun"), metrics(tmp_path / "one" / "labels"), rtol=1e-4)


def test_commands_without_the_size_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has a mesh or a pair for each rank. Rank 0 prints mistakes, and which options differ."""
    monkeypatch.setattr(cli, "PATIENCE", 0.0)
    data = write_set(tmp_path / "set")
    same = ["--cache", tmp_path / "cache", *SMALL]
    labels = ["train", "segmentation", "--data", data / "labels", *same]
    pairs = ["train", "correspondence", "--data", data / "pairs", "--map-k", 5, "--channels", 8, *same]
    one, two = tmp_path / "one", tmp_path / "two"
    for name, train, batch in (("labels", labels, "--batch-meshes"), ("pairs", pairs, "--batch-pairs")):
        assert diffnet(*train, batch, 2, "--out", one / name)[::2] == (0, "")
    first, second = commands_of_ranks(
        tmp_path,
        [
            [*labels, "--epochs", 1, "--out", two / "labels"],
            [*pairs, "--out", two / "pairs"],
            [*labels, "--epochs", 0, "--out", two / "refused"],
            [*labels, "--seed", "RANK", "--width", "8RANK", "--out", two / "refused"],
        ],
    )
    assert [(code, err) for code, _, err in first[:2]] == [(0, "")] * 2
    assert diffnet(*labels, "--resume", "--out", two / "labels")[::2] == (0, "")
    for name in ("labels", "pairs"):
        assert results(two / name)["options"]["batch_meshes"] == 2
        np.testing.assert_allclose(metrics(two / name), metrics(one / name), rtol=1e-4)
    assert "Invalid value for '--epochs'" in first[2][2]
    assert first[3][2] == "diffnet: --width is 81 on rank 1 and 80 on rank 0; seed is 1 on rank 1 and 0 on rank 0\n"
    assert second == [(0, "", "")] * 2 + [(2, "", ""), (1, "", "")]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_the_order_of_meshes_and_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Batches of eight: the last one of an epoch has six meshes, so two of eight ranks have none."""
    labels = write_set(tmp_path / "set") / "labels"
    for copy in range(7):
        for path in sorted((labels / "train").iterdir())[: 14 - 2 * copy]:
            shutil.copy(path, path.with_name(f"copy{copy}-{path.name}"))
    train = ["train", "segmentation", "--data", labels, "--cache", tmp_path / "cache", *SMALL, "--batch-meshes", 8]
    own_parts = epoch.own_parts
    seen = tmp_path / "seen"

    def watched(batches: list[list[int]], *rest: Any) -> Any:
        parts = own_parts(batches, *rest)
        with seen.with_suffix(f".{place().rank}").open("a") as file:
            print(json.dumps([batches, parts]), file=file)
        return parts

    def in_rank_0(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **options: Any) -> Any:
            assert place().rank == 0
            return function(*arguments, **options)

        return checked

    monkeypatch.setattr(epoch, "own_parts", watched)
    for module, names in ((loop, ("save_checkpoint", "write_atomically")), (run, ("write_atomically", "make_folder"))):
        for name in names:
            monkeypatch.setattr(module, name, in_rank_0(getattr(module, name)))
    assert diffnet(*train, "--out", tmp_path / "one")[::2] == (0, "")
    order = [json.loads(line)[0] for line in seen.with_suffix(".0").read_text().splitlines()]
    seen = tmp_path / "several"
    for found in commands_of_ranks(tmp_path, [[*train, "--out", tmp_path / "several"]], ranks):
        assert [(code, err) for code, _, err in found] == [(0, "")]
    np.testing.assert_allclose(metrics(tmp_path / "several"), metrics(tmp_path / "one"), rtol=1e-4)
    every = [
        [json.loads(line) for line in seen.with_suffix(f".{rank}").read_text().splitlines()] for rank in range(ranks)
    ]
    assert len(order) == 2
    assert order[0] != order[1]
    for number, batches in enumerate(order):
        assert all(found[number][0] == batches for found in every)
        numbers = iter(range(100))
        for n, batch in enumerate(batches):
            used = [i for found in every for part in found[number][1][n] for i in part]
            assert sorted(used) == [next(numbers) for _ in batch]


def test_predictions(tmp_path: Path) -> None:
    labels, classes, meshes = tmp_path / "labels.safetensors", tmp_path / "classes.safetensors", tmp_path / "meshes"
    metadata = {"features": "xyz", "k": 8, "normalize": True, "label_names": list("abc")}
    DiffusionNet(3, 3, width=8, blocks=1).save(labels, **metadata)
    DiffusionNet(3, 3, width=8, blocks=1, outputs_at="global_mean").save(classes, **metadata)
    write_balls(meshes, 5, ".off", labeled=False)
    (meshes / "bad.off").write_text("OFF\n1 1 0\n0 0 0\n3 0 1 2\n")

    def commands(out: Path) -> list[list[object]]:
        predict = ["predict", meshes, "--jobs", 1, "--checkpoint"]
        files = [*predict, labels, "--format", "npy", "--out", out / "files"]
        return [
            [*files, "--cache", out / "cache"],
            [*files, "--resume"],
            [*predict, classes, "--out", out / "table" / "t.csv"],
            [*predict, labels, "--out", out / "pages", "--probabilities", out / "pages/p.npz"],
            [*predict, labels, "--format", "txt", "--out", out / "none", "--instances"],
        ]

    one = [diffnet(*command) for command in commands(tmp_path / "one")]
    first, second = commands_of_ranks(tmp_path, commands(tmp_path / "two"))
    assert [code for code, _, _ in first] == [code for code, _, _ in second] == [1] * 5
    for found, expected in zip(first[:-1], one[:-1], strict=True):
        assert found[2] == expected[2]
        assert sorted(found[1].replace(f"{tmp_path / 'two'}", f"{tmp_path / 'one'}").splitlines()[1:]) == sorted(
            expected[1].splitlines()[1:]
        )
    assert [out + err for _, out, err in second] == [""] * 5
    assert first[-1] == one[-1]
    for folder in ("files", "table", "pages"):
        assert files_of(tmp_path / "two" / folder) == files_of(tmp_path / "one" / folder)
    assert not (tmp_path / "two" / "none").exists()


def test_a_slow_rank_finds_the_error_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is a part of rank 0, which waits until rank 1 has read the error."""
    wait = ranks._wait_for  # private: no public function makes one rank slow

    def slow(condition: Callable[[], bool], seconds: float) -> None:
        wait(condition, seconds)
        if place().rank == 1:
            time.sleep(0.3)

    monkeypatch.setattr(ranks, "_wait_for", slow)
    train = ["train", "segmentation", "--data", tmp_path / "set", "--device", "cpu", "--out", tmp_path / "run"]
    first, second = commands_of_ranks(tmp_path, [train])
    assert "set: no such file or folder" in first[0][2]
    assert second == [(1, "", "")]


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path) -> None:
    """Graphs of the parts, NCCL between them, and a rank without a mesh in the last batch."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    labels = write_set(tmp_path / "set") / "labels"
    train = ["train", "segmentation", "--data", labels, "--cache", tmp_path / "cache", *SMALL, "--precision", "fp32"]
    train += ["--device", "cuda", "--batch-meshes", 3, "--clip", 1.0, "--average-weights", 0.9, "--out"]
    assert diffnet(*train, tmp_path / "one")[::2] == (0, "")
    for name, more in (("two", []), ("passes", ["--accumulate", 2])):
        ran = torchrun("-m", "diffnet", *train, tmp_path / name, *more)
        assert ran.returncode == 0, ran.stderr
        np.testing.assert_allclose(metrics(tmp_path / name), metrics(tmp_path / "one"), rtol=1e-3)


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Rank 1 is killed in the second epoch. The resumed run ends with the bits of one that nobody has stopped."""
    labels = write_set(tmp_path / "set") / "labels"
    train = ["train", "segmentation", "--data", labels, "--cache", tmp_path / "cache", *SMALL, "--dropout", 0.5]
    train += ["--batch-meshes", 2, "--checkpoint-every", 1]
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = torchrun(script, *train, "--out", tmp_path / "killed")
    assert killed.returncode == 1
    left = f"{tmp_path / 'killed' / 'last.pt'} holds the last checkpoint; --resume continues from it."
    reason = rf"^diffnet: rank 1 \(on .*\) of 2 missing: no sign of life for .* s\. {re.escape(left)}$"
    assert re.search(reason, killed.stderr, re.MULTILINE), killed.stderr
    stored = load_checkpoint(tmp_path / "killed" / "last.pt")
    assert (len(stored["history"]), stored["position"]["steps"]) == (1, 2)
    # Rank 1 sees another label first.
    other = tmp_path / "other"
    shutil.copytree(labels, other)
    np.savetxt(other / "train" / "m2.txt", np.zeros(42), fmt="%d")
    alone = [*train[:3], tmp_path / "RANK", *train[4:]]
    for rank, data in enumerate((labels, other)):
        (tmp_path / str(rank)).symlink_to(data)
    resumed = [*train, "--resume", "--out", tmp_path / "killed"]
    first, second = commands_of_ranks(
        tmp_path, [[*alone, "--out", tmp_path / "refused"], resumed, [*train, "--out", tmp_path / "whole"]]
    )
    assert [own[0][0] for own in (first, second)] == [1, 1]
    assert "rank 1 has other data than rank 0: m2" in first[0][2]
    assert second[0][2] == ""
    for own in (first, second):
        assert [(code, err) for code, _, err in own[1:]] == [(0, "")] * 2
    every = [load_checkpoint(tmp_path / name / "last.pt") for name in ("killed", "whole")]
    for name in every[0]["model"]:
        assert torch.equal(*(found["model"][name] for found in every))
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


KILLED = """
import os, signal, sys, time
from pathlib import Path
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.steps.step import TrainingStep
update, taken = TrainingStep.update, []
def steps_of_checkpoint():
    return (load_checkpoint(Path(sys.argv[-1]) / "last.pt")["position"] or {"steps": 0})["steps"]
def killing(self, reduce):
    taken.append(1)
    if os.environ["RANK"] == "1" and len(taken) == 7:  # the third step of the second epoch
        deadline = time.monotonic() + 30  # torchrun ends rank 0 at once, so it should have written the second step
        while steps_of_checkpoint() < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, reduce)
TrainingStep.update = killing
if __name__ == "__main__":
    from diffnet.__main__ import main
    from diffnet.interrupts import raise_at_sigterm
    raise_at_sigterm()
    main()
"""
