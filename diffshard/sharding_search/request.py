"""What a search is about: the arguments of `search`, the function traced for its own arguments, and their space."""

import math
from dataclasses import replace
from typing import NamedTuple, TypeVar

from diffshard.base import PlanError, Progress
from diffshard.plans.base import PlanData
from diffshard.plans.sections import Rematerialisation
from diffshard.sharding_search.mesh_candidates import MeshCandidate
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import TracedFunction, space_of, traced_again
from search_spaces.rematerialisation.choices import RematChoice
from search_spaces.rematerialisation.offloading import Offload
from search_spaces.rematerialisation.passes import passes_of, step_key
from search_spaces.rematerialisation.program import RematerialisedFunction
from search_spaces.sharding.space import ShardingSpace

PlanT = TypeVar("PlanT", bound=PlanData)


class PlanRequest(NamedTuple):
    """A function that wants a plan, with all that finding one takes.

    Attributes:
      space: its space, of any memory limit; that of the options holds.
      progress: called as `progress(seconds, cost, lower_bound)` while a solver runs; None for nothing.
      step_limit_s: only a plan whose step is shorter is wanted.
    """

    options: Options
    traced_function: TracedFunction
    space: ShardingSpace
    start_s: float
    progress: Progress | None = None
    step_limit_s: float = math.inf

    def with_recomputed(self, chosen: PlanData | Rematerialisation | RematChoice) -> "PlanRequest":
        """Returns the request for the function that runs steps again and offloads arrays as a plan or choice says."""
        if not chosen.recomputed and not chosen.offloaded:
            return self
        return self.of_function(self.options, _recomputing(self.traced_function, chosen))

    def of_function(self, options: Options, traced_function: TracedFunction) -> "PlanRequest":
        """Returns the request for a function that was traced with other options or is another one."""
        return self._replace(options=options, traced_function=traced_function, space=space_of(options, traced_function))

    def complete(self, plan: PlanT) -> PlanT:
        """Returns a plan that was read with what is known of this function and is not written."""
        structures = self.traced_function.call.structure, self.traced_function.result
        return replace(plan, mesh=self.options.candidate_with(plan.mesh_axes).mesh, structures=structures)

    def on(self, candidate: MeshCandidate) -> "PlanRequest":
        """Returns the request for a chosen mesh."""
        options = self.options.on(candidate)
        return self._replace(options=options, space=space_of(options, self.traced_function))


def _recomputing(traced_function: TracedFunction, chosen: PlanData | Rematerialisation | RematChoice) -> TracedFunction:
    """Returns a function that runs some steps of its forward pass again in its backward pass."""
    graph, recomputed = traced_function.graph, frozenset(chosen.recomputed)
    passes, offloads = passes_of(graph), [Offload(*numbers) for numbers in chosen.offloaded]
    known = {step_key(step) for one in passes for step in one.forward}
    if not recomputed <= known:
        raise PlanError("The plan does not fit the function: what it computes again is not in its forward pass.")
    known |= {0, *(step_key(step) for one in passes for step in one.backward)}
    for offload in offloads:
        if not 0 <= offload.value < len(graph.values) or not {offload.gone_before, offload.back_from} <= known:
            raise PlanError("The plan does not fit the function: what it offloads is not in its forward pass.")
    return traced_again(traced_function, RematerialisedFunction(graph, recomputed, offloads))
