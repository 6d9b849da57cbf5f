"""Times peers side by side."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from diffnet.benchmarks.harness.registry import Run, Unavailable


@dataclass(frozen=True)
class Measurement:
    """The result of a peer.

    milliseconds: time of every timed run
    peak_mb: peak memory beyond the memory held before, in units of 2²⁰ bytes. It is the GPU's memory, or on the CPU the
        resident memory of the process (None if there is no /proc).
    """

    milliseconds: tuple[float, ...]
    peak_mb: float | None


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
) -> dict[str, Measurement | Failure]:
    """Time peers in turns, so that a changing clock or a noisy neighbor affects all of them alike.

    Each peer first runs three times without being measured (imports, compilation, autotuning, memory pools). Then all
    peers take turns until `seconds` have passed, at least 5 and at most 200 times. If the first call of a peer takes
    longer than `seconds`, that call is its measurement and the peer is not called again. On a GPU the first call may
    compile, so there the second call decides.

    flush: whether to empty the GPU's L2 cache before each run
    wall_clock: see `Case`
    """
    found: dict[str, Measurement | Failure] = {}
    ready: dict[str, Run] = {}
    peaks: dict[str, float | None] = {}
    for name, run in peers.items():
        try:
            ms, peak = _time_and_peak_mb(run, device, wall_clock)
            if device.type == "cuda" or ms <= 1e3 * seconds:
                ms, peak = _time_and_peak_mb(run, device, wall_clock)
            if ms > 1e3 * seconds:
                found[name] = Measurement((ms,), peak)
                continue
            _time(run, device, None, wall_clock)
            ready[name], peaks[name] = run, peak
        except Exception as error:  # the other peers keep their results; the caller reports it
            found[name] = _failure(error)
        finally:
            _release(device)
    scratch = _l2_scratch(device) if flush else None
    times: dict[str, list[float]] = {name: [] for name in ready}
    started = time.perf_counter()
    rounds = 0
    while times and (rounds < 5 or (rounds < 200 and time.perf_counter() - started < seconds)):
        for name in list(times):
            try:
                times[name].append(_time(ready[name], device, scratch, wall_clock))
            except Exception as error:
                found[name] = _failure(error)
                del times[name]
        rounds += 1
    for name, values in times.items():
        found[name] = Measurement(tuple(values), peaks[name])
    return {name: found[name] for name in peers}


def _time(run: Run, device: torch.device, scratch: torch.Tensor | None, wall_clock: bool) -> float:
    """Milliseconds of one run."""
    if device.type == "cuda" and wall_clock:
        if scratch is not None:
            scratch.zero_()
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - started)
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    if scratch is not None:
        scratch.zero_()
    # The GPU sleeps while Python launches the kernels of `run`, so it never waits for Python.
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _time_and_peak_mb(run: Run, device: torch.device, wall_clock: bool) -> tuple[float, float | None]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        ms = _time(run, device, None, wall_clock)
        return ms, (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if not _PEAK_RESET.exists():
        return _time(run, device, None, wall_clock), None
    _PEAK_RESET.write_text("5")  # resets the peak resident size, VmHWM
    start = _resident_mb("VmRSS")
    ms = _time(run, device, None, wall_clock)
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
