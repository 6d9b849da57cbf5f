"""The command as a function, and an empty registry."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from diffnet.benchmarks import Benchmark
from diffnet.benchmarks.__main__ import main
from diffnet.benchmarks.harness import registry as registry_module, run as run_module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `python -m diffnet.benchmarks` with the given arguments on a device, and returns its exit code."""

    def run(*arguments: object, device: str = "cpu") -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments), "--device", device])
        try:
            main()
        except SystemExit as e:
            return int(e.code or 0)
        return 0

    return run


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Benchmark]:
    """An empty registry in place of the real one."""
    mine: dict[str, Benchmark] = {}
    # The command imports BENCHMARKS from the package to resolve "all", which no test with this fixture uses.
    monkeypatch.setattr(registry_module, "BENCHMARKS", mine)
    monkeypatch.setattr(run_module, "BENCHMARKS", mine)
    return mine
