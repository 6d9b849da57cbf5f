"""The memory of graphed networks. Without a GPU, graphs and what lives in their pool are emulated."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import trimesh
from graph_emulator import EmulatedGraph, network
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffnet import Operators, collate, precompute
from diffnet.cuda_graphs import lane as lane_module
from diffnet.cuda_graphs.buffers import BatchBuffers
from diffnet.cuda_graphs.forward import GraphedForward, Recording
from diffnet.cuda_graphs.lane import Lane
from diffnet.cuda_graphs.runtime import Settings
from diffnet.cuda_graphs.static_operators import StaticOperators


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """Spheres of 642 and 162 vertices. Their gradients on the basis are not prepared."""
    return [precompute(trimesh.creation.icosphere(i), k=6) for i in (3, 2)]


class Pool:
    """Tells what happens while memory comes from the pool of the graphs."""

    def __init__(self) -> None:
        self.is_open = False
        self.uses = 0
        self.live: set[int] = set()

    @contextmanager
    def allocating_in(self, pool: Any, device: torch.device) -> Iterator[None]:
        self.is_open, self.uses = True, self.uses + 1
        try:
            yield
        finally:
            self.is_open = False

    def live_blocks(self, pool: Any, device: torch.device) -> frozenset[int]:
        return frozenset(self.live)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    emulated = Pool()
    monkeypatch.setattr(lane_module, "allocating_in", emulated.allocating_in)
    monkeypatch.setattr(lane_module, "live_blocks", emulated.live_blocks)
    return emulated


class Once:
    """A graph that is recorded and never replayed. As a CUDA graph, it keeps no function."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        function()

    def replay(self) -> None:
        pass


def graphed(network: nn.Module, recorder: Any = EmulatedGraph) -> GraphedForward:
    return GraphedForward(network, Settings("vertices", 0, recorder=recorder))


def step(forward: GraphedForward, operators: Operators) -> Tensor:
    out: Tensor = forward(operators.frames[:, 2], operators)
    out.sum().backward()
    return out


def recordings(forward: GraphedForward) -> list[Recording]:
    return list(forward.lanes[0]._graphs.values())  # nothing public tells what is recorded


@pytest.mark.parametrize("options", [{}, {"gradient": "sparse"}], ids=str)
def test_fields_are_read_before_the_first_call_of_another_size(
    meshes: list[Operators], pool: Pool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool]] = []
    rows = BatchBuffers.rows

    def noted(self: BatchBuffers, name: str, *arguments: Any, **given: Any) -> Tensor:
        made.append((name, pool.is_open))
        return rows(self, name, *arguments, **given)

    monkeypatch.setattr(BatchBuffers, "rows", noted)
    forward = graphed(network(**options))
    for operators in meshes:
        step(forward, operators)
    assert pool.uses == 1  # the first size has no graphs whose memory it could use
    assert made
    assert not any(is_open for _, is_open in made)
    larger, smaller = recordings(forward)
    # Nothing public tells which buffers there are.
    assert list(smaller.inputs.buffers._filled) == list(larger.inputs.buffers._filled)
    assert smaller.inputs.operators.fields_read() == larger.inputs.operators.fields_read()


def test_the_first_call_of_a_configuration_takes_its_memory_from_elsewhere(meshes: list[Operators], pool: Pool) -> None:
    """It may leave tensors. A second call, before it is recorded, uses the memory of the graphs if there are any."""
    forward = graphed(network())
    step(forward, meshes[0])
    assert pool.uses == 0
    with torch.no_grad():
        forward(meshes[1].frames[:, 2], meshes[1])
    assert pool.uses == 1
    step(forward, meshes[1])
    assert pool.uses == 2


def test_a_first_visit_of_a_larger_batch_runs_after_the_graphs_of_smaller_ones_are_dropped(
    meshes: list[Operators],
) -> None:
    large, small = meshes
    forward = GraphedForward(network(), Settings("vertices", 1, recorder=EmulatedGraph))
    for _ in range(2):
        step(forward, small)
    assert len(recordings(forward)) == 1
    step(forward, large)
    assert recordings(forward) == []
    for _ in range(2):
        step(forward, large)
        step(forward, small)
    assert len(recordings(forward)) == 2


class Twos:
    def __init__(self, pool: Pool) -> None:
        self.kept: dict[int, Tensor] = {}
        self.pool = pool

    def __call__(self, size: int) -> Tensor:
        if size not in self.kept:
            self.kept[size] = torch.full((size, 1), 2.0)
            if self.pool.is_open:
                self.pool.live.add(size)
        return self.kept[size]


class Keeping(nn.Module):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.net, self.twos = network(), Twos(pool)

    def forward(self, x: Tensor, operators: Operators) -> Tensor:
        return self.net(x * self.twos(len(x)), operators)


def test_graphs_that_could_overwrite_a_tensor_are_dropped(pool: Pool) -> None:
    sizes = [precompute(trimesh.creation.icosphere(i), k=6) for i in (4, 3, 2, 1)]
    forward = graphed(Keeping(pool))
    step(forward, sizes[0])
    for i in (1, 2):
        before = recordings(forward)
        step(forward, sizes[i])
        assert len(pool.live) == i
        assert not any(old is new for old in before for new in recordings(forward))
        assert len(recordings(forward)) == 1
        step(forward, sizes[0])
        assert len(recordings(forward)) == 2
    assert pool.uses == 3  # the second tensor that stays is the last one
    step(forward, sizes[3])
    assert len(recordings(forward)) == 3
    assert pool.uses == 3
    assert len(pool.live) == 2


class Made(TorchDispatchMode):
    """Remembers the memory of the tensors that operations make while the pool is open."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.memory: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        views = [result.alias_info is not None for result in op._schema.returns]
        if self.pool.is_open and not all(views):
            made = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
            self.memory += [(str(op), StorageWeakRef(storage)) for storage in made]
        return out


def test_the_first_call_of_a_size_leaves_no_tensor_in_the_pool(pool: Pool) -> None:
    """On kernels. A tensor that stays would make the lane drop its graphs and take more memory."""
    pytest.importorskip("triton")
    forward = graphed(network(backend="triton", dropout=0.5))
    made = Made(pool)
    mesh = precompute(trimesh.creation.icosphere(0), k=6)
    for operators in (collate([mesh, mesh]), mesh):
        with made:
            step(forward, operators)
    assert pool.uses == 1
    assert len(made.memory) > 20
    gc.collect()  # Triton's interpreter keeps arguments of kernels in cycles
    assert [op for op, memory in made.memory if not memory.expired()] == []


def test_graphs_are_dropped_after_an_error(pool: Pool) -> None:
    lane: Lane[int] = Lane(torch.device("cpu"), EmulatedGraph)
    lane.record([lambda: None])
    lane.keep("size", 1)
    with pytest.raises(ZeroDivisionError), lane.memory():
        raise ZeroDivisionError
    assert pool.uses == 1
    assert lane.get("size") is None


def test_tensors_that_wait_for_the_garbage_collector_are_no_reason_to_drop_graphs(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane: Lane[int] = Lane(torch.device("cpu"), EmulatedGraph)
    lane.record([lambda: None])
    lane.keep("size", 1)
    monkeypatch.setattr(gc, "collect", lambda: pool.live.clear())
    with lane.memory():
        pool.live.add(1)
    assert lane.get("size") == 1


@pytest.mark.parametrize("options", [{}, {"gradient": "sparse"}], ids=str)
def test_a_recording_keeps_no_batch_and_is_freed_without_the_garbage_collector(
    meshes: list[Operators], options: dict[str, Any]
) -> None:
    forward = graphed(network(**options), Once)
    batch = replace(meshes[1])
    gc.collect()
    gc.disable()
    try:
        for operators in (meshes[0], batch):
            step(forward, operators)
        found = [weakref.ref(batch)]
        found += [
            weakref.ref(x)
            for r in recordings(forward)
            for x in (r, r.inputs.buffers, r.inputs.buffers.arena, r.forward)
        ]
        del batch, operators
        assert found[0]() is None
        forward.lanes[0].clear()
        assert [ref() for ref in found] == [None] * len(found)
    finally:
        gc.enable()


def test_memory_of_a_failed_call_is_free_before_the_network_runs_without_graphs(meshes: list[Operators]) -> None:
    made: list[weakref.ref[Tensor]] = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, operators: Operators) -> Tensor:
            if isinstance(operators, StaticOperators):
                large = torch.zeros(10)
                made.append(weakref.ref(large))
                raise torch.OutOfMemoryError
            assert [each() for each in made] == [None] * len(made)
            return self.net(x, operators)

    gc.disable()
    try:
        with pytest.warns(RuntimeWarning, match="don't fit into the memory"):
            step(graphed(Failing()), meshes[1])
    finally:
        gc.enable()
