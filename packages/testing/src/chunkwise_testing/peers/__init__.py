"""Peers: libraries that the benchmark compares with, each behind an adapter; imported only when asked for.

An adapter calls a peer's public function and nothing else. No package of this project needs a peer.
"""

from __future__ import annotations

from chunkwise_testing.peers.adapter import Adapter, LoadedPeer, Peer, PeerError, find
from chunkwise_testing.peers.fla_core import FLA_CORE
from chunkwise_testing.peers.flash_qla import FLASH_QLA

PEERS: dict[str, Peer] = {peer.name: peer for peer in (FLA_CORE, FLASH_QLA)}
"""Every peer, by the name of its pip package."""

__all__ = ["PEERS", "Adapter", "LoadedPeer", "Peer", "PeerError", "find"]
