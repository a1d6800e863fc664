"""Simple GLA, linear attention with one gate a head, on Triton."""
