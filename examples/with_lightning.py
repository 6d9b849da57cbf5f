"""Train and test a network with Lightning. It moves batches to the GPU, and can use several."""

import lightning
import torch

from diffnet import DiffusionNet
from diffnet.data import BODIES, MeshSamples, Preprocessing, collate_samples, load_dataset


class Segmentation(lightning.LightningModule):
    def __init__(self, classes: int):
        super().__init__()
        self.network = DiffusionNet(16, classes, width=32, blocks=2)

    def training_step(self, batch, batch_idx):
        logits = self.network(batch.features, batch.operators)
        return torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=-1)

    def test_step(self, batch, batch_idx):
        predicted = self.network(batch.features, batch.operators).argmax(-1)
        self.log("accuracy", (predicted == batch.labels).float().mean(), batch_size=len(batch.labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def main(epochs: int = 10, meshes: int = 16, k: int = 32) -> None:
    data, options = load_dataset(BODIES, labels_at="vertices"), Preprocessing(k=k, features="log-hks")
    train, test = (MeshSamples(part, options, "cache") for part in (data.train[:meshes], data.test[:4]))
    model = Segmentation(len(data.label_names))
    trainer = lightning.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(model, torch.utils.data.DataLoader(train, batch_size=2, shuffle=True, collate_fn=collate_samples))
    scores = trainer.test(model, torch.utils.data.DataLoader(test, collate_fn=collate_samples), verbose=False)
    print(f"test accuracy {scores[0]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
