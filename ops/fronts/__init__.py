"""Triangular solves with the factors of a multifrontal Cholesky factorization, one level of fronts at a time."""
