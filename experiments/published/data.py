"""Reads what others measured: training runs and kernels, rows of JSON that lie beside the repository."""

import gzip
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "measured"
HELD_OUT_SHARE = 1 / 3
SEED = 0


class MissingDataError(Exception):
    """The measured rows are not on this machine; the message says where they are looked for."""


def read(name: Literal["training_runs", "kernels"], folder: Path | None = None) -> list[dict[str, Any]]:
    """Returns the rows of one of the two files, in its order.

    Raises:
      MissingDataError: the file is not there.
    """
    path = (FOLDER if folder is None else folder) / f"{name}.jsonl.gz"
    if not path.exists():
        raise MissingDataError(
            f"{path} is missing: rows of JSON, one a line, gzipped. Put it there, then run this again."
        )
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def held_out(families: list[str]) -> np.ndarray:
    """Returns which rows nothing may be chosen by, `[rows]`: a third of each family, drawn with a fixed seed.

    Args:
      families: of each row, in the file's order.
    """
    drawn, rng = np.zeros(len(families), bool), np.random.default_rng(SEED)
    for family in dict.fromkeys(families):
        members = np.flatnonzero([other == family for other in families])
        drawn[rng.permutation(members)[: round(HELD_OUT_SHARE * len(members))]] = True
    return drawn
