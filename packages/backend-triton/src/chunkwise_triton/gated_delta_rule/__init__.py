"""The gated delta rule on Triton."""
