"""Several threads precompute and predict at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from two_ranks import environment

# In a new process, the threads also race for the imports.
SCRIPT = """
import sys, threading, warnings
warnings.simplefilter("error")
import numpy as np
import diffnet

MESHES, THREADS = 3, 4
start, results, broken = threading.Barrier(THREADS), {}, []

def grid(i):
    x, y = np.meshgrid(np.linspace(0, 1, 9), np.linspace(0, 1 + i, 9))
    corner = (np.arange(8)[:, None] * 9 + np.arange(8)).reshape(-1)
    faces = np.concatenate([np.stack([corner, corner + 1, corner + 9], 1),
                            np.stack([corner + 1, corner + 10, corner + 9], 1)])
    return np.stack([x.ravel(), y.ravel(), np.sin(3 * x + y).ravel() / 3], 1), faces

def work(thread):
    try:
        start.wait()
        import torch
        torch.set_num_threads(1)
        outputs = []
        for i in range(MESHES):
            operators = diffnet.precompute(grid(i), k=8, cache_dir=sys.argv[1])
            start.wait()
            shared.setdefault(i, operators)
            operators = shared[i]  # one object for all threads: its fields are computed at the first use
            features = diffnet.hks(operators, 4)
            with torch.no_grad():
                for model in models():
                    outputs.append(model(features, operators))
            outputs.append(operators.edges)
        results[thread] = outputs
    except BaseException as e:
        broken.append(e)
        start.abort()
        raise

shared, made, making = {}, [], threading.Lock()

def models():
    import torch
    with making:
        if not made:
            torch.manual_seed(0)
            for at, options in (("vertices", {}), ("edges", {"gradient": "sparse", "attention_heads": 2}),
                                ("vertices", {"diffusion": "implicit"})):
                made.append(diffnet.DiffusionNet(4, 3, width=8, blocks=1, outputs_at=at, **options).eval())
    return made

threads = [threading.Thread(target=work, args=(t,)) for t in range(THREADS)]
for t in threads: t.start()
for t in threads: t.join()
assert not broken, broken
import torch
serial = []
for i in range(MESHES):
    operators = diffnet.precompute(grid(i), k=8)
    with torch.no_grad():
        serial += [model(diffnet.hks(operators, 4), operators) for model in made] + [operators.edges]
for outputs in results.values():
    for a, b in zip(outputs, serial, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1.3e-6, atol=1e-5)  # torch.testing takes most of a second to import
print(len(results))
"""


def test_threads_share_a_cache_and_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "4"), ran.stderr
    assert ran.stderr == ""
