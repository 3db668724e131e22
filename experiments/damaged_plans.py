"""Damaged plan files: each is refused with a clear error, or is a plan that can be shown and given to its function.

    python -m experiments.damaged_plans [--cases 10000] [--seed 0]

A small plan is searched and saved. A case changes one entry of the file: it is replaced by a value of another kind or
by an entry from elsewhere, removed, or doubled. All kinds of entries are changed equally often, however many there are
of them. Then the file is read and, if it is not refused, shown as text, as a page and beside the original, and given to
the function that it was made for. Whatever is raised but `PlanError` counts as a raw error, other than the
message that a plan has argnums or argnames which the function does not have.
"""

import argparse
import copy
import json
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import diffshard
from diffshard.base import PlanError
from diffshard.plans.file import from_json, to_json

MEMORY_LIMIT_BYTES = 3e6
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -1.0, 1e30, 10**400),
    *("nan", "inf", "-inf", "", "zzz", "data", "float99", "x" * 50, "<b>"),
    *([], {}, [[]], [0], [-1], [999], {"a": 1}),
)
"""What entries are replaced by."""
REFUSED, TAKEN = "refused", "taken"
_OTHER_ARGUMENTS = ("names a position that the 2 arguments do not have", "which is no argument of train_step")
"""What is said of argnums and argnames when the plan is given to its function."""
Place = tuple[str | int, ...]


def train_step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Trains two layers; the plan is for this function."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"]).sum()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), loss


def arguments() -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the shapes of `train_step`'s arguments."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return {"up": shape(256, 512), "down": shape(512, 256)}, shape(64, 256)


def small_plan() -> diffshard.Plan:
    """Searches the plan whose file is damaged."""
    mesh = AbstractMesh((2, 4), ("data", "model"))
    step = diffshard.search(train_step, mesh, hardware="h100", memory_limit_bytes=MEMORY_LIMIT_BYTES)
    return step.plan(*arguments())


class Damage:
    """Damaged copies of a plan's file, and what becomes of them.

    Args:
      plan: the whole plan.
    """

    def __init__(self, plan: diffshard.Plan):
        self.plan = plan
        self.document = json.loads(json.dumps(to_json(plan)))
        self.places = list(_places(self.document))[1:]
        kinds: dict[tuple[str, ...], list[Place]] = defaultdict(list)
        for place in self.places:
            kinds[tuple(key if isinstance(key, str) else "*" for key in place)].append(place)
        self.kinds = list(kinds.values())

    def document_of(self, seed: int) -> Any:
        """Returns the document of a case."""
        rng, document = random.Random(seed), copy.deepcopy(self.document)
        place: Any = rng.choice(rng.choice(self.kinds))
        *way, last = place
        inner = _entry(document, way)
        change = rng.choice(("replace", "replace", "replace", "remove", "double", "move"))
        if change == "remove":
            del inner[last]
        elif change == "double" and isinstance(inner, list):
            inner.insert(last, copy.deepcopy(inner[last]))
        elif change == "replace":
            inner[last] = copy.deepcopy(rng.choice(VALUES))
        else:
            inner[last] = copy.deepcopy(_entry(self.document, rng.choice(self.places)))
        return document

    def outcome(self, seed: int) -> str:
        """Returns what becomes of a case: `REFUSED`, `TAKEN`, or where which error came from."""
        try:
            plan = from_json(self.document_of(seed), "plan.json", diffshard.Plan)
            _ = str(plan), plan.html(), str(self.plan.diff(plan))
            plan.apply(train_step).plan(*arguments())
        except PlanError:
            return REFUSED
        except Exception as error:  # whatever it is, it is counted
            if any(sentence in str(error) for sentence in _OTHER_ARGUMENTS):
                return REFUSED
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {frame.filename.rpartition('/')[2]}:{frame.lineno}, seed {seed}"
        return TAKEN


def _places(entry: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    pairs = entry.items() if isinstance(entry, dict) else enumerate(entry) if isinstance(entry, list) else ()
    for key, inner in pairs:
        yield from _places(inner, (*place, key))


def _entry(document: Any, place: Sequence[str | int]) -> Any:
    for key in place:
        document = document[key]
    return document


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    options = parser.parse_args(argv)
    damage = Damage(small_plan())
    outcomes = Counter(damage.outcome(seed) for seed in range(options.seed, options.seed + options.cases))
    refused, taken = outcomes.pop(REFUSED, 0), outcomes.pop(TAKEN, 0)
    print(f"{options.cases} damaged files: {refused} refused, {taken} taken, {outcomes.total()} raw errors")
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")


if __name__ == "__main__":
    main()
