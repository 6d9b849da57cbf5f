"""Run a network of `diffnet export` on arrays of `diffnet precompute --npz`, with PyTorch and NumPy alone."""

import json
import sys

import numpy as np
import torch


def main(network: str, inputs: str) -> None:
    texts = {"diffnet.json": ""}
    model = torch.export.load(network, extra_files=texts).module()
    described = json.loads(texts["diffnet.json"])
    with np.load(inputs) as arrays, torch.no_grad():
        outputs = model(**{name: torch.from_numpy(arrays[name]) for name in described["inputs"]})
    labels = outputs.argmax(-1).tolist()
    print(", ".join(f"{name} {labels.count(i)}" for i, name in enumerate(described["metadata"]["label_names"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
