"""Chunkwise PyTorch for every op: the built-in backend `torch`, right on any device."""
