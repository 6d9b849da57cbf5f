"""Label the parts of human bodies, as the original's first experiment does.

Run `python human_segmentation.py FOLDER hks` on labeled meshes, or with "xyz", which needs more
epochs. Without a folder, it takes the built-in bodies.
"""

import sys

import torch

from diffnet import DiffusionNet, GraphedStep, random_rotation
from diffnet.data import BODIES, Preprocessing, load_dataset, make_sample


def main(folder: str = str(BODIES), features: str = "hks", epochs: int = 15, k: int = 32, width: int = 32) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data, options = load_dataset(folder), Preprocessing(k=k, features=features)
    train = [make_sample(item, options, cache_dir="cache").to(device) for item in data.train]
    test = [make_sample(item, options, cache_dir="cache").to(device) for item in data.test]
    model = DiffusionNet(train[0].features.shape[1], len(data.label_names), width=width, outputs_at=data.labels_at)
    optimizer = torch.optim.Adam(model.to(device).parameters(), lr=1e-3)
    step = GraphedStep(model, optimizer, torch.nn.CrossEntropyLoss(ignore_index=-1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    for _ in range(epochs):
        for i in torch.randperm(len(train)).tolist():
            x = random_rotation(train[i].features) if features == "xyz" else train[i].features
            step(x, train[i].operators, train[i].labels)
        schedule.step()
    with torch.no_grad():
        right = torch.cat([model.eval()(s.features, s.operators).argmax(1) == s.labels for s in test])
    print(f"test accuracy {right.double().mean():.3f} at {len(right)} {data.labels_at}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
