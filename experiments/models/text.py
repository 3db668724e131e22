"""Real texts for training, as bytes.

- alice: the opening of "Alice's Adventures in Wonderland", 7 kB. Source: Lewis Carroll, 1865, chapter I; in the public
  domain.
- python_reference: the Python 3.11 language reference, 466 kB. Source: the topics of Python's `help`, copyright Python
  Software Foundation, under the licence in `python_reference.LICENSE.txt`.
"""

from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
NAMES = ("alice", "python_reference")


def encode(text: str) -> np.ndarray:
    """Returns the tokens of a text: its UTF-8 bytes, `[length]` int32."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """Returns the text of tokens; bytes that are not valid UTF-8 become replacement characters."""
    return bytes(np.asarray(tokens, np.uint8)).decode(errors="replace")


def load(name: Literal["alice", "python_reference"] = "alice") -> np.ndarray:
    """Loads a bundled text as tokens, `[length]` int32.

    Raises:
      ValueError: there is no text of the name.
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {NAMES}, not {name!r}.")
    return encode((Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8"))


def sample(tokens: np.ndarray, key: jax.Array, batch: int, sequence: int) -> jax.Array:
    """Draws random windows of the text with the token after each, `[batch, sequence + 1]`."""
    starts = jax.random.randint(key, (batch, 1), 0, len(tokens) - sequence)
    return jnp.asarray(tokens)[starts + jnp.arange(sequence + 1)]
