"""The launches and the CPU time of one training step on a GPU that is not present.

Tensors lie on the CPU and say that they are on a GPU; kernels are not run. The step has 4 blocks of width 128, K = 128,
few vertices, dropout and autocast to bfloat16. test_kernel_compilation.py runs this in a process of its own, without
the interpreter. It prints one JSON object: `kernels` and `pytorch`, how often each kernel and each operation of PyTorch
that needs a kernel was launched, and `empty`, how often memory was allocated.

It also prints `ahead`: how many kernels `compile_ahead` compiles, how many of them are different, how many it runs, and
how many more a step needs. `variants` holds for each kernel how often Triton would compile it for a step with one mesh
and for one with two, and how often again for batches of other sizes. With the argument "time", the script prints the
least CPU time of a step in milliseconds instead, without Triton's part of the launches.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import trimesh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from diffnet import DiffusionNet, collate, precompute
from diffnet.benchmarks.absent_gpu import AbsentGPU
from diffnet.ops import cross_entropy
from diffnet.ops.common import launcher
from diffnet.ops.common.launcher import compile_ahead

K, WIDTH, BLOCKS, CLASSES = 128, 128, 4, 8
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class DeviceOperations(TorchDispatchMode):
    """Counts operations that launch a kernel, which are all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.empty = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = op._schema.name.removeprefix("aten::")
        views = [r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns]
        if name in ALLOCATIONS:
            self.empty += 1
        elif not views or not all(views):
            self.launched[name] += 1
        return op(*args, **(kwargs or {}))


class Compiled:
    """Stands in for a compiled kernel, and does nothing."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        pass


def pretend(launch: Any) -> None:
    """Make tensors on the CPU say that they are on a GPU of 132 multiprocessors, and replace the launch of kernels."""
    driver.set_active(AbsentGPU(90))
    JITFunction.run = launch
    Tensor.is_cuda = True  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132, major=9)


def step_of(meshes: Sequence[trimesh.Trimesh], k: int, dtype: torch.dtype, model: DiffusionNet) -> Any:
    """A function that computes the loss of a network and its gradients."""
    operators = collate([precompute(mesh, k=k) for mesh in meshes]).with_gradient_evecs().with_basis_dtype(dtype)
    x = torch.randn(operators.num_vertices, 3)
    parameters = list(model.parameters())
    labels = torch.randint(model.last.out_features, (len(x),))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(x, operators)
        return cross_entropy(out, labels, -1).mean()

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss().backward()

    step.ahead = lambda: compile_ahead(loss, parameters)  # type: ignore[attr-defined]
    return step


def variants(width: int, k: int, dtype: torch.dtype) -> dict[str, list[int]]:
    """How often Triton would compile each kernel: for a first mesh and a batch of two, and again for other sizes."""
    found: dict[str, set[str]] = {}

    def specialize(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = self.device_caches[90][-1]
        _, specialization, launch_options = binder(*arguments, **options, debug=False)
        found.setdefault(self.__name__, set()).add(f"{specialization} {launch_options}")

    JITFunction.run = specialize
    model = DiffusionNet(3, 7, width=width, blocks=1)
    meshes = [trimesh.creation.cone(1, 2, sections=40 + n) for n in range(6)]  # 42 vertices, 43, …
    batches = [meshes[:1], meshes[1:3], *([mesh] for mesh in meshes[1:]), meshes[:3], meshes[2:6], meshes[:5]]
    counts = []
    for batch in batches:
        step_of(batch, k, dtype, model)()
        counts.append({name: len(keys) for name, keys in found.items()})
    return {name: [counts[1][name], again - counts[1][name]] for name, again in counts[-1].items()}


def ahead(step: Any) -> dict[str, int]:
    """How many kernels `compile_ahead` compiles, how many are different, how many it runs, what a step needs more."""
    compiled: list[str] = []
    ran: list[str] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, specialization, launch_options = self.device_caches[90][-1](*arguments, **options, debug=False)
        (compiled if warmup else ran).append(f"{self.__name__} {specialization} {launch_options}")

    JITFunction.run = record
    generator = torch.get_rng_state()
    step.ahead()
    assert torch.equal(torch.get_rng_state(), generator)
    counts = {"compiled": len(compiled), "different": len(set(compiled)), "ran": len(ran)}
    step()
    return counts | {"more": len(set(ran) - set(compiled))}


def milliseconds(step: Any) -> float:
    """The least CPU time of a step. As on a GPU, launches after the first one go to a compiled kernel."""
    launcher._takes_launches = lambda kernel, compiled: True
    JITFunction.run = lambda self, *arguments, **options: Compiled()
    times = []
    for _ in range(100):
        start = time.process_time()
        step()
        times.append(1e3 * (time.process_time() - start))
    return round(min(times), 3)


def main() -> None:
    torch.set_num_threads(1)
    kernels: Counter[str] = Counter()
    model = DiffusionNet(3, CLASSES, width=WIDTH, blocks=BLOCKS)
    step = step_of([trimesh.creation.icosphere(2)], K, torch.bfloat16, model)

    def launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels[self.__name__] += 1

    pretend(launch)
    if sys.argv[1:] == ["time"]:
        print(json.dumps({"ms": milliseconds(step)}))
        return
    step()
    kernels.clear()
    with DeviceOperations() as operations:
        step()
    found: dict[str, Any] = {"kernels": kernels, "pytorch": operations.launched, "empty": operations.empty}
    found["ahead"] = ahead(step)
    torch.set_float32_matmul_precision("high")
    shapes = [(width, k, dtype) for width, k in ((64, 16), (20, 9)) for dtype in (torch.bfloat16, torch.float32)]
    found["variants"] = [variants(*shape) for shape in shapes]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
