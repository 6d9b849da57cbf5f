"""Times peers side by side."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diffnet.benchmarks.harness.registry import Run, Unavailable


@dataclass(frozen=True)
class Measurement:
    """The result of a peer.

    milliseconds: time of every timed run
    peak_mb: peak memory beyond the memory held before, in units of 2²⁰ bytes. It is the GPU's memory, or on the CPU the
        resident memory of the process (None if there is no /proc). For loops on a GPU it is the memory that PyTorch
        reserves, unused blocks and the memory of CUDA graphs included.
    gpu_ms: for loops on a GPU, the time of the GPU alone
    details: further results of a run, by name
    """

    milliseconds: tuple[float, ...]
    peak_mb: float | None
    gpu_ms: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The error of a peer.

    expected: whether the peer can't run on this machine or in its memory. Otherwise the peer is broken.
    """

    reason: str
    expected: bool


def measure(
    peers: Mapping[str, Run],
    device: torch.device,
    *,
    seconds: float = 1.0,
    flush: bool = True,
    wall_clock: bool = False,
    calls: int = 1,
    warm_up: int = 3,
) -> dict[str, Measurement | Failure]:
    """Time peers in turns, so that a changing clock or a noisy neighbor affects all of them alike.

    Each peer first runs without being measured (imports, compilation, autotuning, memory pools, graphs). Then all
    peers take turns until `seconds` have passed, at least 5 and at most 200 times. If the first call of a peer takes
    longer than `seconds`, that call is its measurement and the peer is not called again. On a GPU the first call may
    compile, so there the second call decides.

    flush: whether to empty the GPU's L2 cache before each run
    wall_clock, calls, warm_up: see `Case`
    """
    found: dict[str, Measurement | Failure] = {}
    ready: dict[str, Run] = {}
    peaks: dict[str, float | None] = {}
    timer = Timer(device, wall_clock, calls)
    for name, run in peers.items():
        held = timer.reserved_mb()
        try:
            ms, peak = timer.time_and_peak_mb(run)
            if device.type == "cuda" or ms <= 1e3 * seconds:
                ms, peak = timer.time_and_peak_mb(run)
            slow = ms > 1e3 * seconds
            for _ in range(0 if slow else warm_up - 2):
                timer.time(run)
            if held is not None:
                peak = torch.cuda.max_memory_reserved(device) / 2**20 - held
            if slow:
                found[name] = Measurement((ms,), peak)
            else:
                ready[name], peaks[name] = run, peak
        except Exception as error:  # the other peers keep their results; the caller reports it
            found[name] = _failure(error)
        finally:
            _release(device)
    timer.scratch = _l2_scratch(device) if flush else None
    times: dict[str, list[float]] = {name: [] for name in ready}
    started = time.perf_counter()
    rounds = 0
    while times and (rounds < 5 or (rounds < 200 and time.perf_counter() - started < seconds)):
        for name in list(times):
            try:
                times[name].append(timer.time(ready[name]))
            except Exception as error:
                found[name] = _failure(error)
                del times[name]
        rounds += 1
    for name, values in times.items():
        try:
            found[name] = Measurement(tuple(values), peaks[name], timer.gpu_ms(ready[name], min(values)))
        except Exception as error:
            found[name] = _failure(error)
    return {name: found[name] for name in peers}


def run_once(peers: Mapping[str, Run], details: Sequence[str]) -> dict[str, Measurement | Failure]:
    """Run each peer once, one after another. A peer returns a mapping with the numbers called `details`."""
    found: dict[str, Measurement | Failure] = {}
    for name, run in peers.items():
        started = time.perf_counter()
        try:
            result = run()
            ms = 1e3 * (time.perf_counter() - started)
            assert isinstance(result, Mapping)
            found[name] = Measurement((ms,), None, details={key: result[key] for key in details})
        except Exception as error:  # the other peers keep their results; the caller reports it
            found[name] = _failure(error)
    return found


@dataclass
class Timer:
    """Measures runs on a device.

    wall_clock, calls: see `Case`
    scratch: memory to write before each run, so that the L2 cache holds nothing of the last run. None keeps the cache.
    """

    device: torch.device
    wall_clock: bool = False
    calls: int = 1
    scratch: torch.Tensor | None = None

    def time(self, run: Run) -> float:
        """Milliseconds of one call."""
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.scratch is not None:
            self.scratch.zero_()
        if on_gpu and not self.wall_clock:
            return self._events(run, HEAD_START)
        if on_gpu:
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self.calls):
            run()
        if on_gpu:
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - started) / self.calls

    def gpu_ms(self, run: Run, wall_ms: float) -> float | None:
        """Mean milliseconds of the GPU alone for the calls of a loop, None if this is no loop on a GPU.

        As in the loop, the L2 cache holds what the call before has left there.

        wall_ms: milliseconds of a call. Launching its kernels takes at most as long.
        """
        if self.device.type != "cuda" or self.calls == 1:
            return None
        head_start = HEAD_START + min(1.5 * wall_ms, 40) * HEAD_START / 2
        return sum(self._events(run, int(head_start)) for _ in range(self.calls)) / self.calls

    def _events(self, run: Run, head_start: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # The GPU sleeps while Python launches the kernels of `run`, so it never waits for Python.
        torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def reserved_mb(self) -> float | None:
        """Before the first call of a loop on a GPU: the memory that PyTorch holds, in units of 2²⁰ bytes."""
        if self.device.type != "cuda" or self.calls == 1:
            return None
        _release(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_reserved(self.device) / 2**20

    def time_and_peak_mb(self, run: Run) -> tuple[float, float | None]:
        if self.device.type == "cuda":
            if self.calls > 1:  # `measure` reads the peak of all calls
                return self.time(run), None
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            ms = self.time(run)
            return ms, (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        if not _PEAK_RESET.exists():
            return self.time(run), None
        _PEAK_RESET.write_text("5")  # resets the peak resident size, VmHWM
        start = _resident_mb("VmRSS")
        ms = self.time(run)
        return ms, _resident_mb("VmHWM") - start


HEAD_START = 4_000_000  # cycles, about 2 ms
_PEAK_RESET = Path("/proc/self/clear_refs")


def _resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 2**10


def _l2_scratch(device: torch.device) -> torch.Tensor | None:
    if device.type != "cuda":
        return None
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(2 * size, dtype=torch.int8, device=device)


def _release(device: torch.device) -> None:
    """Free the memory of a failed peer, so that the next peer can use it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _failure(error: Exception) -> Failure:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failure("out of memory", expected=True)
    text = " ".join(str(error).split())[:300]
    if isinstance(error, Unavailable):
        return Failure(text, expected=True)
    return Failure(f"{type(error).__name__}: {text}", expected=False)
