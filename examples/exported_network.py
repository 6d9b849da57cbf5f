"""Run a network of `diffnet export` on arrays of `diffnet precompute --npz`, with PyTorch and NumPy alone.

Run `python exported_network.py NETWORK ARRAYS`. Without these files, diffnet writes them first: its
network of body parts, and a built-in body.
"""

import json
import subprocess
import sys

import numpy as np
import torch


def written() -> tuple[str, str]:
    from diffnet.data import BODIES

    body, network = str(min((BODIES / "test").iterdir())), ("--checkpoint", "body-parts")
    for arguments in (("export", "--out", "parts.pt2"), ("precompute", body, "--npz", "body.npz")):
        subprocess.run([sys.executable, "-m", "diffnet", *arguments, *network], check=True, stdout=subprocess.DEVNULL)
    return "parts.pt2", "body.npz"


def main(network: str, inputs: str) -> None:
    texts = {"diffnet.json": ""}
    model = torch.export.load(network, extra_files=texts).module()
    described = json.loads(texts["diffnet.json"])
    with np.load(inputs) as arrays, torch.no_grad():
        outputs = model(**{name: torch.from_numpy(arrays[name]) for name in described["inputs"]})
    labels = outputs.argmax(-1).tolist()
    print(", ".join(f"{name} {labels.count(i)}" for i, name in enumerate(described["metadata"]["label_names"])))


if __name__ == "__main__":
    main(*sys.argv[1:] or written())
