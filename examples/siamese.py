"""Train a siamese network: one network embeds both shapes of a pair, and shapes of one kind get similar embeddings."""

import torch
import trimesh
from torch.nn.functional import cosine_embedding_loss, cosine_similarity

from diffnet import DiffusionNet, collate, hks, precompute


def main(pairs: int = 8, steps: int = 100, k: int = 32, seed: int = 3) -> None:
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = [trimesh.creation.capsule(count=[12, 12]), trimesh.creation.torus(1, 0.3)]
    samples = []
    for pair in range(pairs):
        i, j = pair % 2, pair // 2 % 2
        shapes = [(kinds[n].vertices * (1 + 0.3 * torch.rand(3).numpy()), kinds[n].faces) for n in (i, j)]
        samples.append((*(precompute(shape, k=k, normalize=True) for shape in shapes), 1 if i == j else -1))
    left, right, same = (x.to(device) for x in collate(samples))
    model = DiffusionNet(16, 8, width=32, blocks=2, outputs_at="global_mean", dropout=0.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # with 1e-2, all embeddings may become parallel
    for _ in range(steps):
        a, b = model(hks(left).log(), left), model(hks(right).log(), right)  # (pairs, 8) each
        optimizer.zero_grad()
        cosine_embedding_loss(a, b, same).backward()
        optimizer.step()
    cosine = cosine_similarity(a, b)
    print(f"mean cosine {cosine[same == 1].mean():.3f} of equal kinds, {cosine[same == -1].mean():.3f} of others")


if __name__ == "__main__":
    main()
