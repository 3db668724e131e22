"""The equations of rematerialised regions, which stand behind a barrier, and the name scopes of what is in them."""

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from search_spaces.rematerialisation.passes import Step, vertices_of
from search_spaces.replay import bind, context_of, source_of
from search_spaces.sharding.graph import Region, Vertex


@cache
def _remat_template() -> core.JaxprEqn:
    """Returns an equation of a rematerialised region, which says how this version of JAX writes one."""
    (equation,) = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns
    return equation


def remat_equation_results(body: core.ClosedJaxpr, arrays: Sequence[Any]) -> Sequence[Any]:
    """Adds a rematerialised region of a backward pass to the program that is traced, and returns its results."""
    arrays = [*body.consts, *arrays]
    jaxpr = body.jaxpr
    if body.consts:
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return bind(_remat_template(), arrays, jaxpr=jaxpr, prevent_cse=True, differentiated=True)


def joined(*arrays: Any) -> Sequence[Any]:
    """Returns arrays behind a barrier that waits for all of them: an empty region, which needs no sharding rule."""
    types = [jax.typeof(array) for array in arrays]
    return remat_equation_results(jax.make_jaxpr(lambda *inner: inner)(*types), arrays)


@contextmanager
def step_context(step: Step, region: Region | None) -> Any:
    """Restores the name scopes of a step in the body of a region, those of the calls around it included."""
    vertex = step if isinstance(step, Vertex) else next(vertices_of(step))
    callers = list(vertex.callers)
    around = [i for i, caller in enumerate(callers) if region is not None and caller is region.equation]
    callers = callers[around[0] + 1 if around else 0 :]
    own = [i for i, caller in enumerate(callers) if isinstance(step, Region) and caller is step.equation]
    callers = callers[: own[0]] if own else callers
    assert step.equation is not None
    with ExitStack() as stack:
        for caller in callers:
            stack.enter_context(source_of(caller))
        stack.enter_context(context_of(step.equation))
        yield
