"""GLA, linear attention with a gate for each channel of the keys, on Triton."""
