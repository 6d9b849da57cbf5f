"""Eigenpairs of many Laplacians at once on a GPU."""
