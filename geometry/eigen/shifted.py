"""Eigenpairs of L + σI, from those of L."""

from __future__ import annotations

import numpy as np

from diffnet.geometry.eigen.problem import Array, Pairs


def shifted_pairs(pairs: Pairs, lone_mass: Array, shift: float) -> Pairs:
    """The k smallest eigenpairs of (L + σI) φ = λ M φ for a small σ, from the k smallest of L φ = λ M φ.

    The original implementation solves this problem. σ differs from a shift by σM where masses differ, so it separates
    the constants of components.

    pairs: values (k,) ascending and vectors (V, k) with ΦᵀMΦ = I, where missing vectors are 0
    lone_mass: (V,), the masses of vertices with an empty row of L, which take no part in `pairs`, 0 for all others
    shift: σ

    The result is the best one in the span of the given vectors and the lone vertices (Rayleigh-Ritz). It differs from
    the exact one by the square of σ divided by masses and gaps of the spectrum.
    """
    evals, evecs = pairs
    k, found = len(evals), evecs.any(axis=0)
    basis = evecs[:, found]
    values, turn = np.linalg.eigh(np.diag(evals[found]) + shift * basis.T @ basis)
    turn = np.where(np.diag(turn) < 0, -turn, turn)  # keeps the signs of vectors that hardly change
    lone = np.flatnonzero(lone_mass)
    lone = lone[np.argsort(-lone_mass[lone], kind="stable")][:k]
    vectors = np.zeros((len(evecs), len(values) + len(lone)))
    vectors[:, : len(values)] = basis @ turn
    vectors[lone, len(values) + np.arange(len(lone))] = 1 / np.sqrt(lone_mass[lone])
    values = np.concatenate([values, shift / lone_mass[lone]])
    order = np.argsort(values, kind="stable")[:k]
    missing = k - len(order)
    values = np.pad(np.maximum(values[order], 0), (0, missing), "edge") if len(order) else np.zeros(k)
    return values, np.pad(vectors[:, order], ((0, 0), (0, missing)))
