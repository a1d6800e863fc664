"""Softmax attention with a learned sink a head, on Triton."""
