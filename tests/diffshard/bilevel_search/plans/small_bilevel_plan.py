"""A plan of the small communication space as training would leave it: two groups changed, a table of candidates."""

from cost.base import Hardware, Link
from diffshard.bilevel_search.plans.base import TrainedCandidate, ValidationRuns
from diffshard.bilevel_search.plans.plan import BilevelPlan, lossy_plan
from diffshard.bilevel_search.relaxation import best_of
from diffshard.successive_halving import HalvingRecord
from search_spaces.communication.space import CommunicationSpace
from tests.search_spaces.communication.small_communication import small_space

SLOW_LINKS = Hardware("slow links", 1e15, 1e15, 1e10, {axis: Link(1e-7, 1e-9) for axis in ("data", "model")})
STRATEGIES = {
    "mlp/all_reduce forward": "int8",
    "mlp/all_reduce backward": "exact",
    "matrices over data and model gradient": "int8 with error feedback",
    "matrices over data gradient": "int8",
}


def slow_space() -> CommunicationSpace:
    """Where bytes decide, not latency."""
    return small_space(hardware=SLOW_LINKS)


def named_choice(space: CommunicationSpace) -> tuple[int, ...]:
    """`STRATEGIES` as numbers."""
    return tuple(space.strategy_names(v).index(STRATEGIES[group.name]) for v, group in enumerate(space.groups))


def proposed_plan(space: CommunicationSpace | None = None) -> BilevelPlan:
    """As a search leaves it, without training."""
    space = slow_space() if space is None else space
    return lossy_plan(space, best_of(space.problem, {named_choice(space): 0.0125}, 0.02), 0.02)


def validated_plan(space: CommunicationSpace | None = None) -> BilevelPlan:
    """As training leaves it; one candidate was dropped early, one diverged."""
    plan = proposed_plan(space)
    exact = plan.baseline_seconds

    def trained(name: str, seconds: float, loss: float, increase: float, *scores: float) -> TrainedCandidate:
        pairs = tuple((score, seconds) for score in scores)
        record = HalvingRecord(name, pairs, 4 * len(scores))
        return TrainedCandidate(name, plan.choice, 0.0, seconds, loss, increase, record)

    table = (
        trained("proposal", plan.seconds, 2.5125, 0.0125, 0.0, 0.0),
        trained("exact", exact, 2.5, 0.0, 0.0, 0.0),
        trained("all int8", 0.9 * exact, 3.25, 0.25, 0.23),
        trained("all <int4>", 0.5 * exact, float("nan"), float("nan"), float("inf")),
    )
    return plan._replace(validation=ValidationRuns(table, (3.0, 2.5), 24))
