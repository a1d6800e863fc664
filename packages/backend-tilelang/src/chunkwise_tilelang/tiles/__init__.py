"""Building blocks of kernels, for every architecture and op."""
