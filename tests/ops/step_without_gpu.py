"""Training steps of networks for a GPU that is not present, on tensors without content.

A step fails if it reads a tensor back, which would wait for the GPU. It also fails if it creates a tensor on the CPU,
which would have to be copied to the GPU. A launch runs nothing; with the argument "compile" it compiles its kernel.

test_kernel_compilation.py runs this in a process of its own, without the interpreter. It prints, for each network, its
arithmetic, its options and the kernels that it launched.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import trimesh
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

from diffnet import DiffusionNet, collate, precompute
from diffnet.benchmarks.absent_gpu import AbsentGPU
from diffnet.benchmarks.shared_buffers import overwritten_buffers

NETWORKS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient": "sparse"},
    {"attention_heads": 4, "outputs_at": "global_mean"},
    {"gradient_rotation": False, "outputs_at": "faces"},
    {"global_tokens": 16, "condition_channels": 2},
)


class Autocast:
    """Autocast for the meta device, which has none."""

    on = False

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        self.before, Autocast.on = Autocast.on, self.enabled

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Autocast.on = self.before


class OnlyThere(TorchDispatchMode):
    """Runs the real implementations of our operators instead of the fake ones, and lets nothing touch the CPU."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if op.namespace == "diffnet":
            with self:
                return OPDEFS[op._schema.name]._init_fn(*args, **(kwargs or {}))
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, Tensor) or tensor.device.type == "meta", f"{op} on {tensor.device}"
        return out


launched: list[str] = []
driver.set_active(AbsentGPU(90))
run = JITFunction.run


def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compile a kernel and run nothing. The compiler asks of a tensor its dtype and whether its address is aligned."""
    stand_ins = [MockTensor(a.dtype) if isinstance(a, Tensor) else a for a in arguments]
    compiled = run(self, *stand_ins, grid=grid, warmup=True, **options)
    overwritten = overwritten_buffers(compiled.asm.get("ttgir", ""))
    assert not overwritten, f"{self.__name__} {options}: {overwritten} may be overwritten while they are multiplied"
    launched.append(self.__name__)


if sys.argv[1:] == ["compile"]:
    JITFunction.run = compile_only
else:
    JITFunction.run = lambda self, *arguments, **options: launched.append(self.__name__)
torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "meta")  # type: ignore[assignment]
torch.Tensor.is_meta = property(lambda tensor: False)  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132, major=9)
torch.autocast = Autocast  # type: ignore[misc, assignment]
torch.is_autocast_enabled = lambda device: Autocast.on
torch.get_autocast_dtype = lambda device: torch.bfloat16

operators = collate([precompute(trimesh.creation.icosphere(n), k=16) for n in (1, 2)]).to("meta").with_gradient_evecs()
for arithmetic in ("tf32", "fp32", "bf16"):
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    for options in NETWORKS:
        model = DiffusionNet(3, 8, width=64, blocks=1, **options).to("meta")
        x, conditions = (torch.empty(size, device="meta") for size in ((operators.num_vertices, 3), (2, 2)))
        launched.clear()
        with OnlyThere(), Autocast("meta", enabled=arithmetic == "bf16"):
            out = model(x, operators, *[conditions][: "condition_channels" in options])
            F.cross_entropy(out.float(), torch.empty(len(out), dtype=torch.int64, device="meta")).backward()
        assert all(p.grad is not None for p in model.parameters())
        print(json.dumps([arithmetic, options, sorted(set(launched))]), flush=True)
