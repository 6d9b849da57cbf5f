"""Scalars for TensorBoard.

PyTorch's `SummaryWriter` writes on a thread. On a full disk, that thread prints a traceback, and the error of the next
call names no file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from diffnet.geometry.files import named


class EventFile(contextlib.AbstractContextManager["EventFile"]):
    """A new event file in a folder, as a context manager. Each call of `add` writes to the disk.

    purge_step: TensorBoard hides what earlier files of the folder hold of this step and of later ones

    Raises OSError, which names the file, for example if the disk is full.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names. The counter keeps two files of the same second apart.
        start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / f"{start}.{len(list(folder.iterdir()))}"
        self._file = self._path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(step=purge_step, file_version="brain.Event:2"))
        self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars by name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as e:
            with contextlib.suppress(OSError):  # closing tries to write again
                self._file.close()
            raise named(e, self._path) from e
