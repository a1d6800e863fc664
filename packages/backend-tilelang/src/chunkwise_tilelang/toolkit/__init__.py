"""What stands between the kernels and the host: its compiler and the versions that fit together."""
