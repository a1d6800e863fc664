"""Sampling byte by byte: after the prompt, each step feeds one symbol and the carried state."""

import torch
from corpus import BOS
from model import ByteModel, ModelState
from torch import Tensor


@torch.no_grad()
def advance(model: ByteModel, symbols: list[int], state: ModelState | None) -> tuple[Tensor, ModelState]:
    """Feeds `symbols` to one document; the logits [256] fp32 of what follows the last, and the new state.

    The state is all that is kept of the past, so time and memory of a step do not grow with the text.
    """
    tokens = torch.tensor([symbols], device=next(model.parameters()).device)
    offsets = torch.tensor([0, len(symbols)], dtype=torch.int32)
    logits, state = model(tokens, offsets, state, keep_state=True)
    return logits[0, -1], state


def generate(model: ByteModel, prompt: bytes, length: int, *, temperature: float, seed: int) -> bytes:
    """`prompt` and `length` sampled bytes; the prompt is read in one call, the rest byte by byte."""
    model.eval()
    random = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    logits, state = advance(model, [BOS, *prompt], None)
    for _ in range(length):
        probabilities = (logits / temperature).softmax(-1).cpu()
        text.append(int(torch.multinomial(probabilities, 1, generator=random)))
        logits, state = advance(model, [text[-1]], state)
    return bytes(text)
