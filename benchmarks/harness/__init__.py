"""Registers, times, records and plots benchmarks."""
