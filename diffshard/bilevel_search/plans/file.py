"""Plans of the bilevel search as versioned JSON, in the form that `diffshard.plans.documents` gives to all plans."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from diffshard.bilevel_search.plans.base import BilevelPlanData, NodePlan, Proof, TrainedCandidate
from diffshard.plans.documents import BILEVEL, RecordFile
from search_spaces.base import Choice

_DIRECTIONS = ("forward", "backward", "gradient", "")
"""The directions that traffic may have; the empty one is of spaces that do not tell directions apart."""
_MOST_DEVICES = 2**31  # of a mesh: more than JAX can count
_MOST_STRATEGIES = 2**31  # of a node: more than any space can list


def check_bilevel_plan(plan: BilevelPlanData) -> None:
    """Checks that the fields of a plan fit each other; that they have the right types is known."""
    if not plan.nodes:
        raise ValueError("it has no `nodes`")
    _check_choice("", plan.choice, len(plan.nodes))
    axes = plan.mesh_axes
    if math.prod(axes.values()) >= _MOST_DEVICES:
        raise ValueError(f"`mesh_axes` is {dict(axes)}, not axes with their numbers of devices")
    if plan.exact_share == 1:
        raise ValueError(f"`exact_share` is {plan.exact_share}, not from 0 to below 1")
    if not plan.feasible and not plan.message:
        raise ValueError("`feasible` is False, but `message` does not say why")
    for node in plan.nodes:
        _check_node(node, axes)
    if plan.proof is not None:
        _check_proof(plan.proof, len(plan.nodes))
        _check_winner(plan, plan.proof.winner)


def _check_node(node: NodePlan, axes: Mapping[str, int]) -> None:
    where = f" of node {node.name!r}"
    if (traffic := node.traffic) is None:
        return
    if traffic.direction not in _DIRECTIONS:
        raise ValueError(f"`direction`{where} is {traffic.direction!r}, none of {', '.join(_DIRECTIONS[:-1])}")
    for axis in traffic.axes:
        if axes and axis not in axes:
            raise ValueError(f"`axes`{where} has {axis!r}, which is no axis of `mesh_axes`, {tuple(axes)}")


def _check_proof(proof: Proof, num_nodes: int) -> None:
    """Checks that each candidate can be, and that they stand in the order of a proof: the longest trained first."""
    if not proof.finalists:
        raise ValueError("no candidate of `proof` was trained to the end")
    for candidate in proof.table:
        _check_candidate(candidate, num_nodes, len(proof.exact_losses))
    for before, after in itertools.pairwise(proof.table):
        if len(before.record.scores) < len(after.record.scores):
            raise ValueError(
                f"`table` of `proof` has candidate {before.name!r} with {len(before.record.scores)} `scores` before "
                f"{after.name!r} with {len(after.record.scores)}, though the longest trained come first"
            )
    taken_steps = sum(candidate.record.steps for candidate in proof.table)
    if proof.steps < taken_steps:
        raise ValueError(f"`steps` of `proof` is {proof.steps}, fewer than the {taken_steps} of its candidates")


def _check_candidate(candidate: TrainedCandidate, num_nodes: int, num_rungs: int) -> None:
    where = f" of candidate {candidate.name!r}"
    _check_choice(where, candidate.choice, num_nodes)
    scores = candidate.record.scores
    if not 1 <= len(scores) <= num_rungs:
        raise ValueError(f"`scores`{where} are {len(scores)}, not from 1 to the {num_rungs} of `exact_losses`")
    for score in scores:
        if not all(map(_is_number, score if isinstance(score, tuple) and score else (score,))):
            raise ValueError(f"`scores`{where} has {score!r}, which is no number and no list of numbers")


def _check_winner(plan: BilevelPlanData, winner: TrainedCandidate) -> None:
    """Checks that the plan is that of the candidate that won."""
    if plan.choice != winner.choice:
        raise ValueError(f"`choice` is {plan.choice}, but candidate {winner.name!r}, which won, has {winner.choice}")
    for name in ("seconds", "exact_share", "loss_increase"):
        value, won = getattr(plan, name), getattr(winner, name)
        if not (math.isclose(value, won, rel_tol=1e-6) or (math.isnan(value) and math.isnan(won))):
            raise ValueError(f"`{name}` is {value}, but candidate {winner.name!r}, which won, has {won}")


def _check_choice(where: str, choice: Choice, num_nodes: int) -> None:
    if len(choice) != num_nodes:
        raise ValueError(f"`choice`{where} has {len(choice)} numbers for {num_nodes} nodes")
    if min(choice) < 0:
        raise ValueError(f"`choice`{where} is {choice}, with a number below 0")
    if max(choice) >= _MOST_STRATEGIES:
        raise ValueError(f"`choice`{where} has {max(choice)}, which is no strategy that a node could have")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Without its proof, what was measured would pass for a prediction.
_FILE = RecordFile(BILEVEL, 3, check_bilevel_plan, needed=("proof",))
save, load, to_json, from_json = _FILE.save, _FILE.load, _FILE.to_json, _FILE.from_json
