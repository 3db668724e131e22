"""A traced function with a part of its forward pass computed again in its backward pass."""

from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from diffshard.base import PlanError
from diffshard.sharding_search.tracing import TracedFunction
from search_spaces.rematerialisation.offloading import Offload
from search_spaces.rematerialisation.passes import passes_of, step_key
from search_spaces.rematerialisation.program import RematerialisedFunction
from search_spaces.sharding.tracing import build_graph


def recomputing(
    traced_function: TracedFunction, recomputed: frozenset[int], offloaded: Sequence[tuple[int, int, int]] = ()
) -> TracedFunction:
    """Returns a function that runs some steps of its forward pass again in its backward pass.

    Args:
      traced_function: the function.
      recomputed: the steps, as `rematerialisation.passes.step_key` numbers them.
      offloaded: what waits in the host's memory, as `rematerialisation.offloading.Offload`.

    Raises:
      PlanError: the function has no such steps or arrays.
    """
    graph = traced_function.graph
    passes, offloads = passes_of(graph), [Offload(*numbers) for numbers in offloaded]
    known = {step_key(step) for one in passes for step in one.forward}
    if not recomputed <= known:
        raise PlanError("The plan does not fit the function: what it computes again is not in its forward pass.")
    known |= {0, *(step_key(step) for one in passes for step in one.backward)}
    for offload in offloads:
        if not 0 <= offload.value < len(graph.values) or not {offload.gone_before, offload.back_from} <= known:
            raise PlanError("The plan does not fit the function: what it offloads is not in its forward pass.")
    types = [v.aval for v in traced_function.jaxpr.jaxpr.invars]
    arrays = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]
    jaxpr = jax.make_jaxpr(RematerialisedFunction(graph, recomputed, offloads))(*arrays)
    live, _ = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    jaxpr = core.ClosedJaxpr(live, jaxpr.consts)
    return replace(traced_function, jaxpr=jaxpr, graph=build_graph(jaxpr, graph.feedback, traced_function.call.paths))
