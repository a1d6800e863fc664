"""The delta rule of a diagonal and a low-rank part, DPLR, and with it RWKV-7, on Triton."""
