"""Batches of operators: edges, outputs of each mesh, packed samples, and operations as functions of operators."""
