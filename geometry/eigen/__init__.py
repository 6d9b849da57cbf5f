"""The smallest eigenpairs of Laplacians, on the CPU and on a GPU."""
