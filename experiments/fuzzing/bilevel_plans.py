"""Damaged files of bilevel plans: each is refused with a clear error, or is a plan that shows, saves and trains.

A plan of a small communication space is made as training leaves it. A case changes one entry of its file. Then the file
is loaded. A plan that is not refused is shown as text and as a page, its candidates are compared as a Pareto front, the
plan is saved and loaded again, and it is given to the space that it was made for. Three things are faults: any error
other than `PlanError`, a refusal that does not name the file, and a plan that saving and loading changes.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax

from diffshard.base import PlanError
from diffshard.bilevel_search.plans.base import TrainedCandidate, ValidationRuns
from diffshard.bilevel_search.plans.plan import BilevelPlan, pareto, validated_plan
from diffshard.bilevel_search.relaxation import exact_cost
from diffshard.successive_halving import HalvingRecord
from experiments.fuzzing.damage import Damage
from experiments.fuzzing.outcomes import REFUSED, TAKEN, error_outcome
from search_spaces.base import Choice
from search_spaces.communication.space import EXAMPLE, CommunicationSpace

_NUM_STEPS = 100  # of the training that a plan is for


def small_bilevel_plan(space: CommunicationSpace) -> BilevelPlan:
    """Returns the plan that is damaged: a schedule won, one candidate was dropped early, and one diverged."""
    exact = tuple(int(s) for s in space.exact_choice())
    changed = tuple(len(space.strategy_names(v)) // 2 for v in range(len(exact)))
    exact_s, changed_s = exact_cost(space.problem, exact), exact_cost(space.problem, changed)

    def trained(name: str, choice: Choice, share: float, losses: tuple[float, float], *scores: float):
        seconds = share * exact_s + (1 - share) * (exact_s if choice == exact else changed_s)
        record = HalvingRecord(name, tuple((score, seconds) for score in scores), 4 * len(scores))
        return TrainedCandidate(name, choice, share, seconds, *losses, record)

    table = (
        trained("exact, then changed", changed, 0.25, (2.5125, 0.0125), 0.0, 0.0),
        trained("exact", exact, 0.0, (2.5, 0.0), 0.0, 0.0),
        trained("changed", changed, 0.0, (3.25, 0.25), 0.23),
        trained("changed <late>", changed, 0.75, (float("nan"), float("nan")), float("inf")),
    )
    plan = validated_plan(space, exact_s, ValidationRuns(table, (3.0, 2.5), 24), 0.02)
    return plan._replace(notes=("the bytes of a while loop are counted once",))


class BilevelPlanDamage:
    """Damaged copies of a bilevel plan's file, and what becomes of them.

    Args:
      folder: where the files are written.
    """

    def __init__(self, folder: str | Path | None = None):
        self._own_folder = tempfile.TemporaryDirectory() if folder is None else None
        self._folder = Path(self._own_folder.name if self._own_folder else str(folder))
        self.space = EXAMPLE()
        self.plan = small_bilevel_plan(self.space)
        self.plan.save(self._path("whole"))
        document = json.loads(self._path("whole").read_text())
        del document["checksum"]  # which would tell all damage: it is the other checks that are tried
        self.damage = Damage(document)

    def outcome(self, seed: int) -> str:
        """Returns the outcome of a case: `REFUSED`, `TAKEN`, or an error and where it came from."""
        path = self._path("damaged")
        path.write_text(json.dumps(self.damage.document_of(seed)))
        try:
            plan = _loaded(path)
            if plan is None:
                return REFUSED
            _ = str(plan), plan.html(), plan._repr_html_()
            if plan.validation is not None:
                _ = str(plan.validation), pareto(plan.validation.points())
            plan.save(self._path("again"))
            again = _loaded(self._path("again"))
            if again is None or repr(again) != repr(plan):  # by their texts, as NaN is not equal to itself
                return f"another plan after saving, seed {seed}"
            return self._use(lambda: plan.training(self.space, optax.sgd(0.1), _NUM_STEPS))
        except Exception as error:  # whatever it is, it is counted
            return error_outcome(error, seed)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    @staticmethod
    def _use(train: Callable[[], Any]) -> str:
        try:
            train()
        except PlanError:  # it is for another space
            return REFUSED
        return TAKEN


def _loaded(path: Path) -> BilevelPlan | None:
    """Returns the plan of a file, None where it is refused.

    Raises:
      AssertionError: the refusal does not name the file.
    """
    try:
        return BilevelPlan.load(path)
    except PlanError as error:
        if f"`{path}`" not in str(error):
            raise AssertionError(f"{error} does not name the file") from error
        return None
