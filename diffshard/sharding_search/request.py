"""What a search is about: the arguments of `search`, the function traced for its own arguments, and their space."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from diffshard.base import Progress
from diffshard.plans.base import PlanData
from diffshard.sharding_search.mesh_candidates import MeshCandidate
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.recomputing import recomputing
from diffshard.sharding_search.tracing import TracedFunction, space_of
from search_spaces.sharding.space import ShardingSpace

PlanT = TypeVar("PlanT", bound=PlanData)


class PlanRequest(NamedTuple):
    """A function that wants a plan, with all that finding one takes.

    Attributes:
      options: the arguments of the search.
      traced_function: the function.
      space: its space, of any memory limit; that of the options holds.
      start_s: when the search began, by `time.perf_counter`.
      progress: called as `progress(seconds, cost, lower_bound)` while a solver runs; None for nothing.
      step_limit_s: only a plan whose step is shorter is wanted.
    """

    options: Options
    traced_function: TracedFunction
    space: ShardingSpace
    start_s: float
    progress: Progress | None = None
    step_limit_s: float = math.inf

    def with_recomputed(
        self, recomputed: Collection[int], offloaded: Sequence[tuple[int, int, int]] = ()
    ) -> "PlanRequest":
        """Returns the request for the function with these steps run again, and these arrays offloaded."""
        if not recomputed and not offloaded:
            return self
        return self.of_function(self.options, recomputing(self.traced_function, frozenset(recomputed), offloaded))

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
