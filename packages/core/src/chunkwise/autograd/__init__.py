"""Autograd: core owns it; backends give plain forward and backward functions."""
