"""Handwritten digits, 1,797 images of 8x8 pixels from 13 writers.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998 (DOI
10.24432/C50P49), CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/); its test set as scikit-learn carries it
(`digits.csv.gz`, unchanged): a row for each image of 64 numbers of dark pixels out of 16, then the digit.
"""

from pathlib import Path

import numpy as np

CLASSES = 10
SIDE = 8


def load() -> tuple[np.ndarray, np.ndarray]:
    """Loads all images `[1797, 8, 8]` float32 from 0 to 1, and their digits `[1797]` int32."""
    rows = np.loadtxt(Path(__file__).parent / "digits.csv.gz", delimiter=",", dtype=np.float32)
    return rows[:, :-1].reshape(-1, SIDE, SIDE) / 16, rows[:, -1].astype(np.int32)
