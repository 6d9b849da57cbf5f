"""Sparse operations on matrices of SciPy and PyTorch: smooth noisy values on a graph, and learn where to smooth."""

import numpy as np
import scipy.spatial
import torch

from diffnet.ops import SparseMatrix, sddmm, sparse_softmax, spmm


def main(steps: int = 60, points: int = 400) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    positions = np.random.default_rng(0).random((points, 2))
    tree = scipy.spatial.cKDTree(positions)
    graph = tree.sparse_distance_matrix(tree, 0.15, output_type="coo_matrix").tocsr()  # SciPy
    graph.data[:] = 1
    truth = torch.from_numpy(positions[:, :1] > 0.5).float()
    noisy = truth + 0.3 * torch.randn(points, 1)
    mean = spmm(graph, noisy) / spmm(graph, torch.ones(points, 1))

    truth, noisy, x = (each.float().to(device) for each in (truth, noisy, torch.from_numpy(positions)))
    adjacency = torch.sparse_coo_tensor(np.stack(graph.nonzero()), graph.data, graph.shape, check_invariants=True)
    matrix = SparseMatrix.from_torch(adjacency.to(device))  # of PyTorch; converts once what each step uses
    query, key = (torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh()).to(device) for _ in range(2))
    optimizer = torch.optim.Adam([*query.parameters(), *key.parameters()], lr=1e-1)
    for _ in range(steps):
        weights = sparse_softmax(matrix, sddmm(matrix, query(x), key(x)))
        error = (spmm(matrix, weights, noisy) - truth).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    start = (mean - truth.cpu()).square().mean()
    print(f"squared error {start:.4f} of the mean of the neighbors, {error:.4f} with attention")


if __name__ == "__main__":
    main()
