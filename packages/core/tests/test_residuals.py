"""How many states the residual formats have room for."""

import pytest

from chunkwise.autograd.residuals import ENTRY_CHUNKS, chunk_slots, entry_slots


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_room_for_entry_states(chunk_size: int, ragged: bool) -> None:
    """One before every 32nd chunk that has a row; none before rows that are not there."""
    span = ENTRY_CHUNKS * chunk_size
    for tokens, entries in {0: 0, 1: 0, span: 0, span + 1: 1, 2 * span: 1, 2 * span + 1: 2, 9 * span: 8}.items():
        assert entry_slots({"T": tokens, "C": chunk_size}, ragged) == {"entries": entries}


def test_room_for_a_state_of_each_chunk() -> None:
    sizes = {"B": 3, "T": 130, "N": 3, "C": 64}
    assert chunk_slots(sizes, False) == {"slots": 9}
    assert chunk_slots({**sizes, "B": 1, "N": 5}, True) == {"slots": 8}
