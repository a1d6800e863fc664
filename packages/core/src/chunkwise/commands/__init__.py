"""The commands of the command line, a module each; what their arguments mean is in ``arguments``."""
