"""Timing, arithmetics, sweeps and peers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from diffnet.benchmarks import Case, Options, Unavailable, benchmark
from diffnet.benchmarks.harness import timing
from diffnet.benchmarks.harness.arithmetic import arithmetic, floor_ms
from diffnet.benchmarks.harness.peers import both_passes, first_made, where_implemented
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.harness.timing import Failure, Measurement, measure

CPU = torch.device("cpu")


def test_peers_take_turns() -> None:
    calls: list[str] = []
    found = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.1)
    rounds = len(found["a"].milliseconds)
    assert 5 <= rounds <= 200
    assert calls == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * rounds


def test_more_runs_before_the_first_measured_one() -> None:
    calls: list[int] = []
    found = measure({"loop": lambda: calls.append(1)}, CPU, seconds=0.01, warm_up=7)["loop"]
    assert isinstance(found, Measurement)
    assert len(calls) == 7 + len(found.milliseconds)


def test_times_are_those_of_the_work() -> None:
    found = measure({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, CPU, seconds=0.05)
    short, long = (sorted(found[name].milliseconds)[2] for name in ("short", "long"))
    assert 2 <= short < 10 <= 20 <= long < 60


def test_a_slow_peer_runs_once() -> None:
    calls: list[int] = []
    found = measure({"slow": lambda: (calls.append(1), time.sleep(0.05))}, CPU, seconds=0.01)
    assert len(calls) == 1
    assert found["slow"].milliseconds[0] >= 50


def test_a_slow_peer_on_a_gpu_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call may compile."""
    calls: list[str] = []

    def run(name: str, seconds: Sequence[float]) -> float:
        calls.append(name)
        return 1e3 * seconds[min(calls.count(name), len(seconds)) - 1]

    # These three functions are the only ones that touch the device, so replacing them simulates a GPU.
    monkeypatch.setattr(timing.Timer, "time_and_peak_mb", lambda timer, peer: (peer(), 0.0))
    monkeypatch.setattr(timing.Timer, "time", lambda timer, peer: peer())  # returns milliseconds of `run` above
    monkeypatch.setattr(timing, "_release", lambda device: None)  # would empty the memory pool of a GPU
    peers = {"slow": partial(run, "slow", [9, 8]), "compiled": partial(run, "compiled", [9, 0.25])}
    found = measure(peers, torch.device("cuda"), seconds=1, flush=False)
    assert found["slow"] == Measurement((8000,), 0)
    compiled = found["compiled"]
    assert isinstance(compiled, Measurement)
    assert set(compiled.milliseconds) == {250}
    assert calls == ["slow"] * 2 + ["compiled"] * (3 + len(compiled.milliseconds))


def test_calls_of_a_loop_are_averaged() -> None:
    calls: list[int] = []

    def sleep() -> None:
        calls.append(1)
        time.sleep(0.004 if len(calls) % 2 else 0.008)

    found = measure({"loop": sleep}, CPU, seconds=0.01, wall_clock=True, calls=2)["loop"]
    assert isinstance(found, Measurement)
    assert len(calls) == 2 * (3 + len(found.milliseconds))
    assert all(6 <= ms < 30 for ms in found.milliseconds)
    assert found.gpu_ms is None


def test_failures_say_why() -> None:
    def absent() -> None:
        raise Unavailable("needs a GPU")

    def too_large() -> None:
        raise MemoryError

    def broken() -> None:
        raise KeyError("x")

    later = iter(range(5))
    found = measure(
        {"absent": absent, "large": too_large, "broken": broken, "later": lambda: next(later), "fine": lambda: None},
        CPU,
        seconds=0.1,
    )
    assert found["absent"] == Failure("needs a GPU", expected=True)
    assert found["large"] == Failure("out of memory", expected=True)
    assert found["broken"] == Failure("KeyError: 'x'", expected=False)
    assert found["later"] == Failure("StopIteration: ", expected=False)
    assert isinstance(found["fine"], Measurement)
    assert list(found) == ["absent", "large", "broken", "later", "fine"]


def test_two_benchmarks_of_one_name(registry: dict) -> None:
    def cases(options: Options) -> Iterator[Case]:
        yield from ()

    benchmark("twice")(cases)
    with pytest.raises(ValueError, match="'twice' is already registered"):
        benchmark("twice")(cases)
    assert list(registry) == ["twice"]


def test_floor() -> None:
    """Gradient features in the direct form, at C = 256 and 2¹⁹ vertices, are bound by arithmetic, not by memory."""
    kind = arithmetic("bf16")
    assert floor_ms(12 * 128 * 256 * 2**19, 0, kind) == pytest.approx(0.303, rel=0.01)
    assert floor_ms(0, 4.27e9, kind) == pytest.approx(1)


def test_sweep_takes_options_before_defaults_and_sets_the_precision() -> None:
    before = torch.get_float32_matmul_precision()
    found = []
    for size in sweep(Options(CPU, widths=(3, 4)), dtypes=("tf32", "bf16"), widths=(8,), vertices=(10,)):
        found.append((size.parameters(k=2), torch.get_float32_matmul_precision()))
    assert found == [
        ({"dtype": dtype, "k": 2, "width": width, "vertices": 10}, precision)
        for dtype, precision in (("tf32", "high"), ("bf16", "highest"))
        for width in (3, 4)
    ]
    assert torch.get_float32_matmul_precision() == before


def test_both_passes_compute_the_outputs_and_the_gradients() -> None:
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 5.0], requires_grad=True)
    (forward, outputs), (backward, gradients) = both_passes(CPU, {"product": lambda: x * y}, [x, y], kernels=())
    assert (forward, backward) == ("forward", "backward")
    assert outputs["product"]().tolist() == [3.0, 10.0]
    x_grad, y_grad = gradients["product"]()  # y ∘ g and x ∘ g, for a random g
    assert (x_grad != 0).all()
    torch.testing.assert_close(x_grad * x, y_grad * y)
    torch.testing.assert_close(gradients["product"](), (x_grad, y_grad))  # the graph is kept


def test_kernels_are_unavailable_on_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for _, peers in both_passes(CPU, {"triton": lambda: torch.ones(1)}, []):
        with pytest.raises(Unavailable, match=r"need a GPU|isn't installed"):
            peers["triton"]()


def test_a_peer_is_made_once_and_only_if_it_is_called() -> None:
    made: list[int] = []
    peer = first_made(lambda: made.append(1) or (lambda: "done"))
    assert made == []
    assert [peer(), peer()] == ["done", "done"]
    assert made == [1]


def test_only_missing_implementations_are_unavailable() -> None:
    def missing() -> None:
        raise NotImplementedError("'addmm' not implemented for 'Half'\nmore")

    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(Unavailable, match=r"not implemented for 'Half'$"):
        where_implemented(missing)()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        where_implemented(broken)()
