"""The delta rule: the kernels of the gated delta rule under gates of zero."""
