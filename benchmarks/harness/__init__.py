"""Registering, timing and recording benchmarks."""
