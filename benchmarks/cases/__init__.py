"""The benchmarks of operations, operators and preprocessing."""
