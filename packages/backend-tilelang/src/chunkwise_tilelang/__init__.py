"""The TileLang backend of chunkwise, for NVIDIA GPUs of sm_90, sm_120 and sm_121.

Nothing is used from here directly: chunkwise finds the backend by its entry point, ``backend.py``.
"""
