"""Real text for training: the opening of "Alice's Adventures in Wonderland" as bytes.

Source: Lewis Carroll, 1865, chapter I; in the public domain.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256


def encode(text: str) -> np.ndarray:
    """Tokens of a text: its UTF-8 bytes, `[length]` int32."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of tokens; what is no UTF-8 becomes a replacement character."""
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def load() -> np.ndarray:
    """The bundled text as tokens, `[length]` int32."""
    return encode((Path(__file__).parent / "alice.txt").read_text(encoding="utf-8"))


def sample(tokens: np.ndarray, key: jax.Array, batch: int, sequence: int) -> jax.Array:
    """Random windows of the text with the token after each, `[batch, sequence + 1]`."""
    starts = jax.random.randint(key, (batch, 1), 0, len(tokens) - sequence)
    return jnp.asarray(tokens)[starts + jnp.arange(sequence + 1)]
