"""The Triton backend of chunkwise, for NVIDIA GPUs of sm_80 and newer.

Nothing is used from here directly: chunkwise finds the backend by its entry point, ``backend.py``.
"""
