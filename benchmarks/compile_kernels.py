"""Compiles all Triton kernels for GPUs of compute capability 8.0, 9.0 and 10.0, or for one of AMD, without a GPU.

`python -m diffnet.benchmarks.compile_kernels --out DIR` writes `kernels.csv` with one row for each compiled kernel, and
prints a summary. A stopped run leaves the rows of kernels that were compiled. The command fails if a kernel does not
compile, uses more shared memory than there is, or may overwrite what matrix units still read.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver

from diffnet.benchmarks.absent_gpu import AbsentGPU
from diffnet.benchmarks.harness.results import Row
from diffnet.benchmarks.launched_kernels import Variant, variants
from diffnet.benchmarks.shared_buffers import overwritten_buffers
from diffnet.ops.common.launcher import GuardedKernel

CAPABILITIES = (80, 90, 100)
COLUMNS = ("kernel", "sm", "types", "tile", "flags", "registers", "stack", "shared", "result", "seconds")
AMD = ("gfx942",)  # they take the tiles of 8.0
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of kernels.csv")
    parser.add_argument(
        "--capability", type=int, action="append", choices=CAPABILITIES, help="repeatable; all three by default"
    )
    parser.add_argument("--amd", choices=AMD, default="", help="a GPU of AMD instead")
    parser.add_argument("--quick", action="store_true", help="one tile of each kernel and dtype, for 9.0 by default")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes, one per core")
    options = parser.parse_args(arguments)
    capabilities = [80] if options.amd else options.capability or ([90] if options.quick else CAPABILITIES)
    options.out.mkdir(parents=True, exist_ok=True)
    table: list[Row] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        # Processes start anew with these variables. An empty cache makes all of them compile.
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
        processes = multiprocessing.get_context("spawn")
        with processes.Pool(len(capabilities), maxtasksperchild=1) as pool:  # `variants` changes its process
            each = pool.map(partial(variants, amd=options.amd), capabilities, chunksize=1)
            found = [variant for some in each for variant in some]
        if options.quick:
            quick = {(variant.capability, variant.launch.name, variant.types): variant for variant in found}
            found = list(quick.values())
        with ProcessPoolExecutor(options.jobs, processes) as executor, (options.out / "kernels.csv").open("w") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in executor.map(partial(compiled, amd=options.amd), found, chunksize=8):
                writer.writerow(row)
                file.flush()
                table.append(row)
    print(summary(table))
    print(f"Triton {triton.__version__}, {options.jobs} processes, {time.perf_counter() - start:.0f} seconds")
    return int(any(row["result"] != "ok" for row in table))


def compiled(variant: Variant, amd: str = "") -> Row:
    """Compile a kernel and return its row of the table. The column "result" is "ok", or says what is wrong."""
    launch = variant.launch
    row: Row = {"kernel": launch.name, "sm": amd or variant.capability, "types": variant.types, "tile": variant.tile}
    row |= {"flags": variant.flags, "registers": None, "stack": None, "shared": None}
    driver.set_active(AbsentGPU(variant.capability, amd))
    kernel = getattr(import_module(launch.module), launch.name)
    kernel = kernel.kernel if isinstance(kernel, GuardedKernel) else kernel
    start = time.perf_counter()
    try:
        result = kernel.run(*launch.arguments, grid=(1,), warmup=True, **launch.options)
    except Exception as error:  # the compiler raises errors of all kinds, and other kernels should follow
        row["result"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        row |= _usage_on_amd(result.asm["amdgcn"]) if amd else _usage(result.asm["cubin"])
        row["shared"] = result.metadata.shared
        row["result"] = _fault(variant, result, amd)
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def _fault(variant: Variant, result: Any, amd: str) -> str:
    most, shared, code = 64 * 1024 if amd else _shared_memory(variant), result.metadata.shared, result.asm["ttgir"]
    if shared > most:
        return f"takes {shared} bytes of shared memory, there are {most}"
    overwritten = [] if amd else overwritten_buffers(code)
    if overwritten:
        return f"{', '.join(overwritten)} may be overwritten while they are multiplied"
    # Triton hoists the maximum of a loop-carried value out of the loop. The lengths of the first rows would then bound
    # those of all others.
    if variant.launch.name == "spmm_forward_rows_kernel" and "tt.reduce" in code.partition("scf.for")[0]:
        return "the longest row is found ahead of the loop"
    return "ok"


def _shared_memory(variant: Variant) -> int:
    """The bytes of shared memory that a program may use.

    Other GPUs take the tiles of 8.0, and some have 99 KB. Tiles of blocks have the user's size; an A100 has 163 KB.
    """
    if variant.capability >= 90:
        return 227 * 1024
    return (163 if variant.launch.name.startswith("block_") else 99) * 1024


def _usage(binary: bytes) -> Row:
    """The registers of a thread, and the bytes of its stack, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found is not None, shown
    return {"registers": int(found[1]), "stack": int(found[2])}


def _usage_on_amd(assembly: str) -> Row:
    found = {name: re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size")}
    registers, stack = (int(match[1]) if match else None for match in found.values())
    return {"registers": registers, "stack": stack}


def summary(table: Sequence[Row]) -> str:
    """One line for each GPU: kernels, variants, those that spill registers, those that are wrong, and core-seconds."""
    lines = []
    for capability in dict.fromkeys(row["sm"] for row in table):
        rows = [row for row in table if row["sm"] == capability]
        results = Counter(row["result"] == "ok" for row in rows)
        spilling = sum(1 for row in rows if row["stack"])
        seconds = sum(float(row["seconds"] or 0) for row in rows)
        gpu = capability if isinstance(capability, str) else f"sm_{capability}"
        lines.append(
            f"{gpu}: {len({row['kernel'] for row in rows})} kernels, {len(rows)} variants, "
            f"{spilling} spill registers, {results[False]} wrong, {seconds:.0f} seconds of compilation"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
