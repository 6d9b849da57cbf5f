"""Sparse matrices with separate structure and values: patterns, products and softmax."""
