"""A network of the original implementation in memory, on operators of diffnet, and the same network in diffnet."""

import torch
import trimesh
from torch import nn

from diffnet import DiffusionNet, precompute


class OriginalNet(nn.Module):
    """Stands for `diffusion_net.layers.DiffusionNet(C_in, C_out, C_width=C, N_block=1)`, with its names."""

    def __init__(self, C_in: int, C_out: int, C: int) -> None:
        super().__init__()
        self.first_lin, self.last_lin = nn.Linear(C_in, C), nn.Linear(C, C_out)
        layers = {f"miniMLP_mlp_layer_00{i}": nn.Linear(3 * C if i == 0 else C, C) for i in range(3)}
        rotations = {name: nn.Linear(C, C, bias=False) for name in ("A_re", "A_im")}
        times = nn.ParameterDict({"diffusion_time": torch.rand(C)})
        parts = {"diffusion": times, "gradient_features": nn.ModuleDict(rotations), "mlp": nn.ModuleDict(layers)}
        self.block_0 = nn.ModuleDict(parts)

    def forward(self, x, mass, L, evals, evecs, gradX, gradY):
        x, block = self.first_lin(x), self.block_0
        spectrum = evecs.T @ (x * mass[:, None])
        diffused = evecs @ (torch.exp(-evals[:, None] * block.diffusion.diffusion_time) * spectrum)
        gx, gy = gradX @ diffused, gradY @ diffused
        re, im = block.gradient_features.values()
        features = torch.tanh(gx * (re(gx) - im(gy)) + gy * (re(gy) + im(gx)))
        first, second, third = block.mlp.values()
        combined = torch.cat([x, diffused, features], dim=-1)
        return self.last_lin(x + third(second(first(combined).relu()).relu()))


def main(k: int = 32) -> None:
    mesh = trimesh.creation.torus(1, 0.4)
    operators = precompute(mesh, k=k, normalize=True, operators="original")
    frames, mass, L, evals, evecs, gradX, gradY = operators.to_reference()  # as `get_operators` returns them
    original, x = OriginalNet(3, 8, 32), frames[:, 2]
    with torch.no_grad():
        expected = original(x, mass, L, evals, evecs, gradX, gradY)
        network = DiffusionNet.from_original_state_dict(original.state_dict(), last_activation=None)
        found = network(x, operators)
    print(f"outputs up to {expected.abs().max():.3f} differ by {(found - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
