"""A transformer layer of your own, with attention in a window and pruned feed-forward weights."""

import torch
from torch import nn

from diffnet import SparseLinear, SparseMultiheadAttention
from diffnet.ops import Pattern


class Layer(nn.Module):
    def __init__(self, channels: int, heads: int, density: float) -> None:
        super().__init__()
        self.attention = SparseMultiheadAttention(channels, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        dense = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.wide, self.narrow = (SparseLinear.from_dense(each, density=density) for each in dense)

    def forward(self, x: torch.Tensor, pattern: Pattern, padding: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, pattern, key_padding_mask=padding)
        return x + self.narrow(torch.relu(self.wide(self.norms[1](x))))


def main(steps: int = 60, length: int = 64, channels: int = 32) -> None:
    """Learn whether a token was seen among the three before it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embed, layer, last = nn.Embedding(12, channels), Layer(channels, 4, density=0.3), nn.Linear(channels, 2)
    model = nn.ModuleList([embed, layer, last]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pattern = Pattern.window(length, before=3).to(device)
    for _ in range(steps):
        tokens = torch.randint(12, (16, length), device=device)
        seen = torch.stack([tokens == tokens.roll(i, 1) for i in (1, 2, 3)]).any(0)[:, 3:].long()
        out = last(layer(embed(tokens), pattern, torch.zeros_like(tokens, dtype=torch.bool)))[:, 3:]
        optimizer.zero_grad()
        nn.functional.cross_entropy(out.transpose(1, 2), seen).backward()
        optimizer.step()
    print(f"accuracy {(out.argmax(-1) == seen).float().mean():.3f}, without learning {(seen == 0).float().mean():.3f}")


if __name__ == "__main__":
    main()
