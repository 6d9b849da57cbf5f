"""Training loops over meshes of mixed sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diffnet.benchmarks.harness.peers import first_made, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.loops.peers import largest_batch, training_peers
from diffnet.benchmarks.loops.workload import mixed_meshes

MESHES = 24
BATCH = 4
PASSES = 10  # that record graphs, because the sizes of four shuffled meshes occur again only after several passes


@benchmark("training-loop", x="vertices_per_step", metrics=("ms", "MB"))
def training_loop(options: Options) -> Iterator[Case]:
    """Steps of a training loop over 24 shuffled meshes of mixed sizes, with one or four meshes per step.

    The largest mesh has the given number of vertices, and the smallest one a tenth of it. Times are wall-clock times
    per step, averaged over one pass over the meshes, after 10 passes that are not measured. In the loop "xyz", each
    step rotates positions at random.
    """
    k = options.k or 128
    for size in sweep(options, dtypes=("bf16",), widths=(128,), vertices=(20_000,)):
        for name, batch, rotates in (("one mesh", 1, False), ("four meshes", BATCH, False), ("xyz", 1, True)):
            work = mixed_meshes(size, k, MESHES, batch=batch, rotates=rotates)
            per_step = sum(s.operators.num_vertices for s in work.samples) // work.steps
            peers = training_peers(work, options.compile)
            peers["diffnet, largest batch"] = on_kernels(size.device, first_made(partial(largest_batch, work)))
            yield Case(
                {"loop": name, **size.parameters(k=k), "vertices_per_step": per_step},
                peers,
                wall_clock=True,
                calls=work.steps,
                warm_up=PASSES,
            )
