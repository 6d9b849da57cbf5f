"""The lock of a folder that one process at a time writes to."""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import named

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
WINDOWS = os.name == "nt"  # nobody can write to a locked file there, or remove it
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
    path = _lock_file(folder)
    lock = FileLock(path, PATIENCE, poll_interval=0.02, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise OptionError(_held(path)) from None
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise named(e, path) from e
        warnings.warn(f"{path}: this file system has no locks ({e.strerror}); start one run at a time", stacklevel=3)
    try:
        if not WINDOWS:
            try:
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            except OSError as e:
                raise named(e, path) from e
        yield
    finally:
        if not WINDOWS:
            path.unlink(missing_ok=True)
        lock.release()


def check_unlocked(folder: Path) -> None:
    """Raises OptionError if a run holds the lock of a folder, which it names, and for a file that is no lock."""
    path = _lock_file(folder)
    try:
        if path.exists():
            with FileLock(path, timeout=0, fallback_to_soft=False):
                pass
    except Timeout:
        raise OptionError(_held(path)) from None
    except OSError:  # the lock can't be tried; `locked` gives the reason
        pass


def _lock_file(folder: Path) -> Path:
    """Raises OptionError if the file is a link, a pipe, a folder or another file that is not regular."""
    path = folder / "run.lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OptionError(f"{path}: this should be the lock of a run, and it is a link, a pipe or a folder; remove it")
    return path


def _held(path: Path) -> str:
    try:
        holder = path.read_text().strip()
    except OSError:
        holder = ""
    return f"{path.parent}: another run writes to this folder ({holder or 'a process that has just started'})"
