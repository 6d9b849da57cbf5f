"""A report of the memory that a network with CUDA graphs takes, for tests on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from diffnet.cuda_graphs.lane import Lane


class MemoryReport:
    """Collects readable lines while a test runs on a GPU.

    A first call of a size should leave no tensors in the memory of the graphs. If it does, the lane takes other memory
    for all later calls, see `Lane.memory`. The report then says where these tensors were allocated, which PyTorch
    records until `close`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        has_other_tensors = Lane._has_other_tensors  # nothing public tells which tensors are left

        def noted(lane: Lane[Any], before: frozenset[int]) -> bool:
            found = has_other_tensors(lane, before)
            if found:
                segments = torch.cuda.memory_snapshot(lane._pool)  # type: ignore[no-untyped-call]
                blocks = [block for segment in segments for block in segment["blocks"]]
                self.lines += [origin(block) for block in blocks if is_left(block, before)]
            return found

        monkeypatch.setattr(Lane, "_has_other_tensors", noted)
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(None)

    def note(self, when: str) -> None:
        """Add the memory that PyTorch holds and the memory that tensors take, now and at most."""
        held = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        taken = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.lines.append(f"{when}: reserved {megabytes(*held)}, allocated {megabytes(*taken)}")

    def note_lanes(self, lanes: Sequence[Lane[Any]]) -> None:
        """Add the state of each lane."""
        for i, lane in enumerate(lanes):
            # Nothing public tells whether a lane takes memory from elsewhere.
            state = f"{len(lane.recorded())} graphs, busy: {lane.busy}, a call left tensors: {lane._leaves_tensors}"
            self.lines.append(f"lane {i}: {state}, {lane.arena.capacity}")


def megabytes(now: int, peak: int) -> str:
    return f"{now / 2**20:.0f} MB (at most {peak / 2**20:.0f})"


def is_left(block: dict[str, Any], before: frozenset[int]) -> bool:
    """Whether a block of memory holds a tensor and did not do so before."""
    return block["state"] == "active_allocated" and block["address"] not in before


def origin(block: dict[str, Any]) -> str:
    """The size of a block and the calls that allocated it, the innermost first."""
    calls = [f"    {call['filename']}:{call['line']} {call['name']}" for call in block.get("frames", [])[:25]]
    return "\n".join([f"left {block['size']} bytes, allocated at", *calls])
