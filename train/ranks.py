"""Ranks: processes that work together, started by torchrun. Which one this process is, and what they tell each other.

Ranks talk through the store that torchrun keeps on the first machine. So they need no process group, no locks and no
common clock.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    DistStoreError,
    PrefixStore,
    Store,
    TCPStore,
)

from diffnet.geometry.errors import DiffnetError, OptionError
from diffnet.geometry.files import npy_bytes
from diffnet.interrupts import Terminated, ignore_sigterm
from diffnet.train.console import complain, console, user_message
from diffnet.train.place import Place, place

T = TypeVar("T")

TIMEOUT = 300.0  # seconds without a sign of life, after which a rank is missing; a factorization can block threads
BEAT = 1.0  # seconds between signs of life
GRACE = 10.0  # seconds in which a rank ends when another one has failed
PIECE = 4 << 20  # bytes; a store takes up to 8 MiB at once
_runs = itertools.count()  # of this process; all ranks start the same ones


class RankError(DiffnetError, RuntimeError):
    """Another rank has failed or is missing. The message names it."""


class Ranks:
    """All ranks, as one of them sees them. `connected` makes it.

    All ranks have to call `shared`, `after_first`, `gathered`, `counter`, `handed_out` and `mailbox` in the same order.
    Values are those of JSON, and tensors and arrays among them.

    store: None for one process
    """

    def __init__(self, place: Place, store: Store | None) -> None:
        self.place, self.store = place, store
        self.failure: str | None = None  # of another rank
        self._calls = 0
        self._hosts: list[str] = []
        self._answered = time.monotonic()
        # Signs of life of other ranks, and when the last one came. Rank 0 watches all others, and they watch rank 0.
        self._seen = dict.fromkeys(range(1, place.world_size) if self.is_first else [0], (0, self._answered))
        self._ending, self._ended = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._beat, self._watch)]

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.store is None

    def shared(self, make: Callable[[], Any]) -> Any:
        """The value that rank 0 makes. All ranks raise an error that the user can fix."""
        self._calls += 1
        if self.store is None:
            return make()
        if self.is_first:
            try:
                self._put(f"{self._calls}", [make(), None, {}])
            except DiffnetError as error:
                self._put(f"{self._calls}", [None, str(error), error.reasons])
                raise
        value, message, reasons = self._get(f"{self._calls}")
        if message is not None:
            raise DiffnetError(message).about(reasons)
        return value

    def after_first(self, work: Callable[[], T]) -> T:
        """Rank 0 calls a function, and then the others do so, which find in the cache what rank 0 has stored there."""
        values: list[T] = []
        self.shared(lambda: values.append(work()))
        return values[0] if values else work()

    def gathered(self, value: Any, meanwhile: Callable[[], Any] = lambda: None) -> list[Any]:
        """The values of all ranks. Each waits for all others, and calls `meanwhile` some times a second."""
        self._calls += 1
        if self.store is None:
            return [value]
        self._put(f"{self._calls}/{self.place.rank}", value)
        return [self._get(f"{self._calls}/{rank}", meanwhile) for rank in range(self.place.world_size)]

    def counter(self) -> Callable[[int], int]:
        """A number that several ranks share, 0 at first: a function that adds to it and returns the sum."""
        self._calls += 1
        return partial(self._counted, f"{self._calls}")

    def handed_out(self, count: int) -> Iterator[int]:
        """The numbers from 0 to count - 1. Each goes to the rank that asks first, so idle ranks take more of them."""
        counter = self.counter()
        return iter(range(count)) if self.is_alone else iter(lambda: min(counter(1) - 1, count), count)

    def mailbox(self, receive: Callable[[Any], Any]) -> Callable[..., None]:
        """A function that sends its argument to rank 0, which calls `receive` with it.

        On rank 0, a call also receives what the other ranks have sent. Without an argument, it does only that.
        """
        sent, name, received = self.counter(), f"{self._calls}", 0

        def post(*values: Any) -> None:
            nonlocal received
            if not self.is_first:
                for value in values:
                    self._put(f"{name}/{sent(1)}", value)
                return
            for value in values:
                receive(value)
            while self.store is not None and self.store.check([f"{name}/{received + 1}"]):
                received += 1
                receive(self._get(f"{name}/{received}", delete=True))

        return post

    def _counted(self, name: str, more: int = 0) -> int:
        assert self.store is not None
        return self.store.add(f"{name}, count", more)

    def _put(self, key: str, value: Any) -> None:
        assert self.store is not None
        content = zlib.compress(json.dumps(value, default=_plain).encode())
        pieces = [content[i : i + PIECE] for i in range(0, len(content), PIECE)]
        for i, piece in enumerate(pieces):
            self.store.set(f"{key}, piece {i}", piece)  # type: ignore[arg-type]  # it takes bytes, too
        self.store.set(key, str(len(pieces)))

    def _get(self, key: str, meanwhile: Callable[[], Any] = lambda: None, delete: bool = False) -> Any:
        assert self.store is not None
        pause = 0.001
        # `wait` would keep the store from the other threads.
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, BEAT / 10)
            meanwhile()
        names = [f"{key}, piece {i}" for i in range(int(self.store.get(key)))]
        content = b"".join(map(self.store.get, names))
        for name in (key, *names) if delete else ():
            self.store.delete_key(name)
        return json.loads(zlib.decompress(content), object_hook=_restored)

    def start(self) -> None:
        """Give signs of life, watch those of others, and wait for all ranks to do so."""
        if self.store is not None:
            for thread in self._threads:
                thread.start()
            self._hosts = self.gathered(socket.gethostname())

    def end(self) -> None:
        """Wait until all ranks have got here."""
        if self.store is None:
            return
        self.gathered(None)
        self._leave()
        self._leave_store(GRACE)

    def _leave_store(self, seconds: float) -> None:
        """Rank 0 waits for the others: the store can be a part of its process, and they may still read from it."""
        if self.is_first:
            _wait_for(lambda: self._counted("left") == self.place.world_size - 1, seconds)
        else:
            self._counted("left", 1)

    def explained(self, error: BaseException) -> str | None:
        """The failure of another rank that has caused an error. If there is none, tell the others that this one ends.

        If rank 0 raises the same error, it counts as a failure of rank 0. This takes some seconds at most.
        """
        if self.store is None:
            return None
        self._ending.set()
        ignore_sigterm()
        lost, is_cause, reason = isinstance(error, (DistNetworkError, DistStoreError)), False, _reason(error)
        # torchrun stops the ranks of a machine when one has died. A collective operation fails for the same reason.
        in_group = (
            distributed.is_initialized() and isinstance(error, RuntimeError) and not isinstance(error, DiffnetError)
        )
        with suppress(DistNetworkError, DistStoreError):  # without the store, nobody can be told
            if self.failure is None and not lost and (in_group or isinstance(error, Terminated)):
                _wait_for(lambda: self.failure is not None, (5 if self.is_first else 8) * BEAT)  # rank 0 knows more
                if self.failure is None:
                    self._publish_missing(3 * BEAT)
            is_cause = self.failure is None and not lost
            if is_cause:
                self._leave()  # before its thread finds the failure of this rank
                self._publish(f"rank {self.place.rank}: {reason}")
                if self.is_first and isinstance(error, Exception):
                    self._put("error of rank 0", reason)
            self._counted("told", 1)
            # torchrun stops the other ranks of a machine when one ends, and the store ends with rank 0.
            if isinstance(error, Exception) if is_cause else self.is_first:
                _wait_for(lambda: self._counted("told") == self.place.world_size, (5 if is_cause else 2) * BEAT)
            alike = is_cause and not self.is_first and self.store.check(["error of rank 0"])
            if alike and self._get("error of rank 0") == reason:
                is_cause, self.failure = False, f"rank 0: {reason}"
            if not self.is_first or (is_cause and isinstance(error, Exception)):  # others look for this error
                self._leave_store(BEAT)
        self._leave()
        return None if is_cause else self.failure or self._lost()

    def _leave(self) -> None:
        """Stop giving signs of life. From now on, torchrun may stop this process, because another one has ended."""
        ignore_sigterm()
        self._ended.set()
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(GRACE / 5)  # a call of a store whose machine is gone never returns

    def _beat(self) -> None:
        """Give signs of life, look for those of others, and for failures."""
        assert self.store is not None
        try:
            while not self._ended.wait(BEAT):
                self._counted(f"beats of rank {self.place.rank}", 1)
                self._answered = time.monotonic()
                for rank, (before, _) in self._seen.items():
                    beats = self._counted(f"beats of rank {rank}")
                    if beats != before:
                        self._seen[rank] = beats, self._answered
                self._publish_missing(TIMEOUT)
                if self.store.check(["failure"]):
                    self.failure = self.store.get("failure").decode()
                    return
        except DistError:
            self.failure = self._lost()

    def _watch(self) -> None:
        """Interrupt the main thread when another rank has failed. End the process if that takes too long."""
        while self.failure is None:
            if self._ended.wait(BEAT / 4):
                return
            if time.monotonic() - self._answered > TIMEOUT + BEAT:
                self.failure = self._lost()
        if not self._ending.is_set():
            _interrupt_main()
        if not self._ended.wait(GRACE):
            complain(self.failure)
            os._exit(1)  # the main thread waits for a collective operation or for the store

    def _publish(self, reason: str) -> str:
        """Tell all ranks why the run ends. Returns the first reason that one of them has given."""
        assert self.store is not None
        return self.store.compare_set("failure", "", reason).decode()

    def _publish_missing(self, seconds: float) -> None:
        """Tell all ranks which have given no sign of life for some seconds, if there are any."""
        ranks = [rank for rank, (_, at) in self._seen.items() if at < self._answered - seconds]
        if ranks:
            names = [f"{rank} (on {self._hosts[rank]})" if self._hosts else str(rank) for rank in ranks]
            each = "rank" if len(ranks) == 1 else "ranks"
            since = f"no sign of life for {seconds:.0f} s"
            self.failure = self._publish(f"{each} {', '.join(names)} of {self.place.world_size} missing: {since}")

    def _lost(self) -> str:
        return f"rank {self.place.rank} has lost the store on {_address()[0]}: rank 0 or its machine has ended"


ALONE = Ranks(Place(), None)  # one process


@contextmanager
def connected() -> Iterator[Ranks]:
    """All ranks of a run. One process that nobody else belongs to is a run of one rank.

    Begins and ends when all ranks do so. If a rank fails or is missing, this raises RankError on the others. What they
    compute is interrupted as by Ctrl-C, and a process that doesn't stop within GRACE seconds ends. Only rank 0 prints
    on the console of the commands.

    Raises OptionError for the variables of torchrun, see `place`.
    """
    here = place()
    ranks = Ranks(here, None if here.world_size == 1 else _store(here))
    console.quiet = not ranks.is_first
    try:
        ranks.start()
        yield ranks
        ranks.end()
    except BaseException as error:
        reason = ranks.explained(error)
        if reason is None:
            raise
        raise RankError(reason) from error
    finally:
        console.quiet = False
        # The threads of gloo abort a process that ends before them; nccl would wait for other ranks.
        if not ranks.is_alone and distributed.is_initialized() and distributed.get_backend() == "gloo":
            distributed.destroy_process_group()


@contextmanager
def process_group(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """The process group of `torch.distributed` where there are several ranks, inside `connected`.

    device: that of this rank. The backend is NCCL for a GPU, and else gloo.
    """
    if ranks.store is None:
        yield
        return
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", ranks.store.clone()),  # type: ignore[attr-defined]
        rank=ranks.place.rank,
        world_size=ranks.place.world_size,
        timeout=timedelta(seconds=TIMEOUT),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    distributed.destroy_process_group()  # after an error, `connected` first tells other ranks


def _plain(value: Any) -> Any:
    """A tensor or an array as a value of JSON."""
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        raise TypeError(f"ranks can't send a value of type {type(value).__name__}")
    return {type(value).__name__: b64encode(npy_bytes(np.asarray(value))).decode()}


def _restored(value: dict[str, Any]) -> Any:
    kind = next(iter(value)) if len(value) == 1 else ""
    if kind not in ("Tensor", "ndarray"):
        return value
    array = np.load(io.BytesIO(b64decode(value[kind])))
    return torch.from_numpy(array) if kind == "Tensor" else array


def _store(here: Place) -> Store:
    """A store of all ranks for one run, with names of its own in the store of the process."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"restart {restart}, run {next(_runs)}", _store_of_process(here))


@cache
def _store_of_process(here: Place) -> Store:
    """The store of torchrun or, for ranks that were started in another way, one in rank 0."""
    host, port = _address()
    keeps_it = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(host, port, None, keeps_it, timedelta(seconds=TIMEOUT), wait_for_workers=False)
    except DistError as e:
        problem = "can't keep a store" if keeps_it else "finds no store of rank 0"
        raise RankError(f"rank {here.rank} {problem} on {host}, port {port}: {e}") from e


def _address() -> tuple[str, int]:
    """The host and the port of the store."""
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port.isdecimal():
        raise OptionError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so MASTER_ADDR and MASTER_PORT should be the address of rank "
            f"0, got {host!r} and {port!r}; torchrun sets all of these"
        )
    return host, int(port)


def _interrupt_main() -> None:
    """Raise the exception of Ctrl-C or SIGTERM in the main thread. A process in the background can ignore Ctrl-C."""
    number = next((n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))), None)
    if number is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, number)  # type: ignore[arg-type]  # it runs


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _reason(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        return "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else "stopped by SIGTERM"
    message = user_message(error) if isinstance(error, Exception) else None
    return message or f"{type(error).__name__}: {error}"
