"""The lock of a run's output folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import named

NAME = "run.lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
PATIENCE = 0.3  # seconds; `check_unlocked` in another process holds the lock for some microseconds


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Only one process at a time can.

    The lock is `flock` on the file run.lock, which names the process and its machine. The operating system releases it
    when the process ends, also if the process is killed. The file is then left, and blocks nobody.

    On NFS and other network file systems, the lock also holds between machines if the server supports locks and the
    file system is not mounted with `nolock` or `local_lock`. If it is, the lock holds on one machine only. A file
    system without locks gives a warning, and nothing is locked.

    Raises OptionError, which names the holder, if another run holds the lock, and for a file that is no lock.
    """
    path = folder / NAME
    deadline = time.monotonic() + PATIENCE
    while (file := _lock(path)) is None:
        if time.monotonic() > deadline:
            raise OptionError(_held(path))
        time.sleep(0.02)
    with file:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as e:
            raise named(e, path) from e
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_unlocked(folder: Path) -> None:
    """Raises OptionError if a run holds the lock of a folder, which it names, and for a file that is no lock."""
    path = folder / NAME
    try:
        with _open(path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionError(_held(path)) from None
    except OSError:  # there is no lock, or it can't be tried; `locked` gives the reason
        pass


def _lock(path: Path) -> TextIO | None:
    """Open a file and lock it. None if another process holds its lock."""
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have deleted the file after it was opened here, and a third process may have made another.
        if path.lstat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as e:
        if e.errno in UNSUPPORTED:
            warnings.warn(
                f"{path}: this file system has no locks ({e.strerror}); start one run at a time", stacklevel=4
            )
            return file
        file.close()
        raise named(e, path) from e
    file.close()
    return None


def _open(path: Path, flags: int) -> TextIO:
    """Open a regular file, not the file that a link points to.

    Raises OptionError for a link, a pipe, a folder and others. To open a pipe otherwise waits for its other end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OptionError(f"{path}: this should be the lock of a run, and it is a link, a pipe or a folder; remove it")
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    return os.fdopen(number, "r+" if flags & os.O_RDWR else "r")


def _held(path: Path) -> str:
    try:
        holder = path.read_text().strip()
    except OSError:
        holder = ""
    return f"{path.parent}: another run writes to this folder ({holder or 'a process that has just started'})"
