"""The lock of a run's folder, full disks, and Ctrl-C while a command starts."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
from two_ranks import environment

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import remove_leftovers, write_atomically
from diffnet.geometry.folder_lock import check_unlocked, locked
from diffnet.train.event_file import EventFile

HOLD = """
import sys, time
from pathlib import Path
from diffnet.geometry.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_lock_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            for attempt in (lambda: check_unlocked(tmp_path), locked(tmp_path).__enter__):
                with pytest.raises(OptionError, match=re.escape(str(tmp_path))) as caught:
                    attempt()
                assert f"process {process.pid} on {socket.gethostname()}" in str(caught.value)
        finally:
            process.kill()
    assert (tmp_path / "run.lock").exists()
    check_unlocked(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(OptionError, match=f"process {os.getpid()}"):
            locked(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_only_one_of_many_holds_the_lock(tmp_path: Path) -> None:
    """Each attempt creates and deletes the file, which other attempts may have open."""
    holders: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            with contextlib.suppress(OptionError), locked(tmp_path):
                holders.append(1)
                most.append(len(holders))
                time.sleep(0.0002)
                holders.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(most) >= 30
    assert set(most) == {1}


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    check_unlocked(tmp_path)
    with pytest.warns(UserWarning, match="No locks available"), locked(tmp_path):
        pass


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_is_a_file(tmp_path: Path, kind: str) -> None:
    """The file that a link points to stays. Opening a pipe would wait forever."""
    victim, path = tmp_path / "victim", tmp_path / "run.lock"
    victim.write_text("mine")
    {"link": lambda: path.symlink_to(victim), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    for attempt in (lambda: check_unlocked(tmp_path), locked(tmp_path).__enter__):
        with pytest.raises(OptionError, match=r"run\.lock: this should be the lock of a run, and it is a link, a pipe"):
            attempt()
    assert victim.read_text() == "mine"


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    gone, running = process.pid, os.getppid()
    names = [f".last.pt.{gone}.tmp", f".last.pt.{running}.tmp", f".other.{gone}.tmp", f".last.pt.{gone}", "last.pt"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers([tmp_path / "last.pt", tmp_path / "missing" / "last.pt"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


# ---- full disks ----


def full(*arguments: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file_and_keeps_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    path.write_text("former")
    write = Path.write_bytes

    def half(self: Path, content: bytes) -> None:
        write(self, content[: len(content) // 2])
        full()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        with pytest.raises(OSError, match="No space left") as caught:
            write_atomically(path, "newer")
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_names_itself_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as caught, locked(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path / "run.lock")
    assert list(tmp_path.iterdir()) == []


def test_event_files_name_themselves_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventFile(tmp_path / "board", 1) as board:
        monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            board.add({"loss": 1.0}, 1)
    assert Path(caught.value.filename).parent == tmp_path / "board"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_event_files_fail_once_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the file is closed, too."""
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode: real(Path("/dev/full"), "wb"))
    with pytest.raises(OSError, match="No space left") as caught:
        EventFile(tmp_path / "board", 1)
    assert Path(caught.value.filename).parent == tmp_path / "board"


# ---- Ctrl-C ----


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("how", ["script", "module"])
def test_ctrl_c_while_a_command_starts(tmp_path: Path, how: str) -> None:
    """From the first line of `diffnet` on, no traceback is printed and the exit code is 130."""
    script = tmp_path / "diffnet"
    script.write_text("from diffnet.__main__ import main\nif __name__ == '__main__':\n    main()\n")
    start = [str(script)] if how == "script" else ["-m", "diffnet"]
    command = [sys.executable, "-v", *start, "train", "segmentation", "--data", "bodies", "--out", tmp_path / "run"]
    command += ["--cache", tmp_path / "cache", "--device", "cpu", "--jobs", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Python's own start is not the command's: it ends when the package's first module is opened.
    for delay in [0.05, 0.2, 0.5] if how == "script" else [0.1]:
        process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
        try:
            for line in process.stderr:
                if "import 'diffnet.interrupts'" in line:
                    break
            reader = threading.Thread(target=lambda p=process, lines=(lines := []): lines.extend(p.stderr))
            reader.start()
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == 130, delay
            reader.join()
        finally:
            process.kill()
        printed = "".join(lines)
        assert not re.search(r"Traceback|KeyboardInterrupt\b(?!')|Exception ignored", printed), (delay, printed[-2000:])
