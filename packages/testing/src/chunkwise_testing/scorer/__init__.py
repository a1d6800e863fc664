"""The benchmark scorer: an op against its peers, interleaved in one process, and only where parity is green.

``cli`` is the command, ``score`` runs it, ``gate`` refuses, ``timing``, ``instruments`` and ``graphs`` measure,
``floors`` holds the physical limits, ``results`` and ``render`` are what comes out.
"""
