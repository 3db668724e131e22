"""Draws what each device does and holds before and after: placed greedily, by beam search, and by our search.

    python -m experiments.embedding_tables.picture [--devices 8] [--output docs/images/embedding-tables.png]

The tables are MLPerf's, on H100s.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from diffshard.tables.solving import solve_space
from experiments.embedding_tables import tasks
from experiments.embedding_tables.baselines import SCORES, Placed, beam, greedy
from search_spaces.embedding_tables.base import DecodedTables
from search_spaces.embedding_tables.space import EmbeddingTableSpace

_BY_LOOKUPS = "greedy, lookups"
_COLORS = {"forward": "#2f6f9f", "rest": "#9fc3dd", "memory": "#8a8a8a"}


def placements(num_devices: int, seed: int) -> dict[str, Placed | DecodedTables]:
    """Returns the placement of each way, by its name.

    Raises:
      ValueError: a baseline finds no placement.
    """
    tables, devices = tasks.mlperf(num_devices)
    space = EmbeddingTableSpace(tables, devices)
    found = space.decode(solve_space(space, key=seed).choice)
    others = {_BY_LOOKUPS: greedy(tables, devices, SCORES[_BY_LOOKUPS]), "beam search": beam(tables, devices)}
    for name, placed in others.items():
        if placed is None:
            raise ValueError(f"`--devices` {num_devices}: {name} finds no placement that fits.")
    return {**{name: placed for name, placed in others.items() if placed is not None}, "diffshard": found}


def figure_of(ways: Mapping[str, Placed | DecodedTables]) -> Figure:
    """Draws the ways side by side: milliseconds of each device above, its memory below."""
    figure = Figure(figsize=(9.5, 5), layout="constrained")
    times, memory = figure.subplots(2, len(ways), sharex="all", sharey="row", height_ratios=(3, 2))
    for column, (name, placed) in enumerate(ways.items()):
        forward, rest = 1e3 * np.array(placed.forward_s), 1e3 * np.array(placed.rest_s)
        at, axes = np.arange(len(forward)), times[column]
        axes.bar(at, forward, color=_COLORS["forward"], label="lookups")
        axes.bar(at, rest, bottom=forward, color=_COLORS["rest"], label="exchanges and backward pass")
        axes.axhline(forward.max() + rest.max(), color="black", linewidth=1, linestyle="--", label="step")
        axes.set_title(f"{name}: {forward.max() + rest.max():.2f} ms", fontsize=10)
        memory[column].bar(at, np.array(placed.device_bytes) / 2**30, color=_COLORS["memory"])
        memory[column].set_xlabel("device")
        memory[column].set_xticks(at)
    times[0].set_ylabel("ms")
    memory[0].set_ylabel("GiB")
    figure.legend(*times[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/images/embedding-tables.png"))
    options = parser.parse_args(arguments)
    figure_of(placements(options.devices, options.seed)).savefig(options.output, dpi=110)
    print(f"{options.output} is written.")


if __name__ == "__main__":
    main()
