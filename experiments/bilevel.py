"""What the bilevel search's parts are worth; each table is a command.

    python -m experiments.bilevel loss [--model gpt] [--links slow] [--seeds 5] [--steps N]
                                       [--records DIR] [--quick]
    python -m experiments.bilevel estimators [--model gpt] [--seeds 5] [--steps N]
                                             [--records DIR] [--quick]
    python -m experiments.bilevel overhead [--model gpt] [--quick]
    python -m experiments.bilevel relaxation [--seeds 5] [--steps 200] [--seconds 10] [--quick]
    python -m experiments.bilevel initialisation [--seeds 5] [--quick]

loss: does the loss's gradient help to choose? estimators: do predictions rank strategies as training does? overhead:
what a step of the search costs. Models are a byte GPT, a byte model with experts, and an image classifier. relaxation:
where every choice is exact, does the gradient decide? initialisation: is a search of the start worth its steps? Links
differ in seconds alone, so that trainings are shared between them. With --records an interrupted table goes on.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import bilevel_estimators, bilevel_initialisation, bilevel_loss, bilevel_overhead, bilevel_relaxation
from experiments.bilevel_training import BYTES_PER_S, QUICK, SETTINGS, Setting

TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "loss": lambda o: bilevel_loss.main(_setting(o), o.links, **_trainings(o)),
    "estimators": lambda o: bilevel_estimators.main(_setting(o), **_trainings(o)),
    "overhead": lambda o: bilevel_overhead.main(_setting(o), 2 if o.quick else 30),
    "relaxation": lambda o: bilevel_relaxation.main(o.quick, o.seeds, o.steps or 200, o.seconds),
    "initialisation": lambda o: bilevel_initialisation.main(o.quick, o.seeds),
}


def main(arguments: Sequence[str] | None = None) -> Any:
    """Prints a table; returns its rows.

    Raises:
      ValueError: numbers of steps or seeds that are too small.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", choices=list(SETTINGS), default="gpt")
    parser.add_argument("--steps", type=int, help="of each training, else the model's; of descent in `relaxation`, 200")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each solver in `relaxation`")
    parser.add_argument("--links", nargs="+", choices=list(BYTES_PER_S), default=list(BYTES_PER_S))
    parser.add_argument("--records", type=Path, help="a folder for the runs' records: those already there are taken up")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, few steps, one link speed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps, options.links, options.seconds = 1, 8, ["slow"], 0.5
    steps = 4 if options.steps is None else options.steps
    if options.seeds < 1 or steps < 4 or steps % 4:
        raise ValueError(
            f"`--seeds` must be positive and `--steps` a positive multiple of 4; got {options.seeds} and {steps}."
        )
    return TABLES[options.table](options)


def _setting(options: argparse.Namespace) -> Setting:
    setting = QUICK if options.quick else SETTINGS[options.model]
    return replace(setting, steps=options.steps or setting.steps)


def _trainings(options: argparse.Namespace) -> dict[str, Any]:
    return {"seeds": options.seeds, "records": options.records}


if __name__ == "__main__":
    main()
