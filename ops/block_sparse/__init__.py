"""Block-sparse matrices: patterns, products, softmax and attention."""
