"""How long the first device takes to encode and decode one element, which the communication space prices codes by.

    python -m experiments.encoding_seconds [--elements 1048576] [--repeats 9]

What it prints are the contents of `search_spaces/communication/encoding_seconds.json`, for this kind of device.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

import jax

from cost.calibration import median_s
from search_spaces.communication.base import PRECISIONS
from search_spaces.communication.collectives import ELEMENTS_PER_SCALE, decode, encode


def measure(num_elements: int = 2**20, repeats: int = 9) -> dict[str, Any]:
    """Measures encoding and decoding on the first device; returns the contents of the data file.

    Args:
      num_elements: of the array, a multiple of a block.
      repeats: the number of calls, whose median time is taken.

    Raises:
      ValueError: `num_elements` is not a positive multiple of a block.
    """
    if num_elements < ELEMENTS_PER_SCALE or num_elements % ELEMENTS_PER_SCALE:
        raise ValueError(f"`num_elements` must be a positive multiple of {ELEMENTS_PER_SCALE}, not {num_elements}.")
    device, key = jax.devices()[0], jax.random.key(0)
    x = jax.random.normal(key, (num_elements,))
    seconds = {}
    for precision in (p for nearest in PRECISIONS for p in (nearest, nearest.stochastic)):
        codes = jax.jit(lambda x, precision=precision: encode(x, precision, key))
        values = jax.jit(lambda e, precision=precision: decode(e, precision, num_elements))
        encoded = codes(x)
        total = median_s(lambda codes=codes: codes(x), repeats) + median_s(
            lambda values=values, encoded=encoded: values(encoded), repeats
        )
        seconds[precision.name] = total / 2 / num_elements
    return {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "num_elements": num_elements,
        "seconds_per_element": {device.device_kind.lower(): seconds},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the measured seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**20, help="of the array that is encoded")
    parser.add_argument("--repeats", type=int, default=9, help="calls, whose median time counts")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.elements, options.repeats), indent=2))


if __name__ == "__main__":
    main()
