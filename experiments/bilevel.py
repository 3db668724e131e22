"""What the bilevel search's parts are worth; each table is a command.

    python -m experiments.bilevel loss [--links slow] [--seeds 5] [--steps 200] [--records DIR] [--quick]

Links differ in seconds alone, so that trainings are shared between them. With --records an interrupted table goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import bilevel_loss
from experiments.bilevel_training import BYTES_PER_S, QUICK_SIZES, SIZES


def _loss(options: argparse.Namespace) -> Any:
    sizes = QUICK_SIZES if options.quick else SIZES
    return bilevel_loss.main(options.links, options.seeds, options.steps, options.search_steps, sizes, options.records)


TABLES = {"loss": _loss}


def main(arguments: Sequence[str] | None = None) -> Any:
    """Prints a table; returns its rows.

    Raises:
      ValueError: numbers of steps or seeds that are too small.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--search-steps", type=int, default=100, help="of each search")
    parser.add_argument("--links", nargs="+", choices=list(BYTES_PER_S), default=list(BYTES_PER_S))
    parser.add_argument("--records", type=Path, help="a folder for the runs' records: those already there are taken up")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, few steps, one link speed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps, options.search_steps, options.links = 1, 8, 3, ["slow"]
    if options.seeds < 1 or options.steps < 4 or options.steps % 4 or options.search_steps < 1:
        raise ValueError(
            f"`--seeds` and `--search-steps` must be positive and `--steps` a positive multiple of 4; got "
            f"{options.seeds}, {options.search_steps} and {options.steps}."
        )
    return TABLES[options.table](options)


if __name__ == "__main__":
    main()
