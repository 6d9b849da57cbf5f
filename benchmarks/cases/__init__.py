"""The benchmarks. Each registers itself when its module is imported."""
