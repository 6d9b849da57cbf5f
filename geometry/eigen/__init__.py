"""Eigenpairs of Laplacians."""
