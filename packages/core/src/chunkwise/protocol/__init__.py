"""What an op promises: its signature, axes, contracts, residual formats, and all that is derived from them."""
