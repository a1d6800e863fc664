"""The delta rule on Triton."""
