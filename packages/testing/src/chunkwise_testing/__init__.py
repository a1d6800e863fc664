"""Parity suites, the accuracy measure, poison and benchmarks for chunkwise backends."""

__version__ = "0.1.0"
