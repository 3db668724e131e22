"""A step that computes some of its forward pass again has the results of the step, and keeps less in memory."""

import jax
import numpy as np
import pytest

from search_spaces.rematerialisation.choices import Network
from search_spaces.rematerialisation.passes import passes_of
from search_spaces.rematerialisation.program import RematerialisedFunction
from tests.search_spaces.rematerialisation.differentiated_steps import STEPS, arguments, graph_of


def network_of(graph):
    """Returns the choices of a graph on one device where a step takes as many seconds as it makes bytes."""

    def step_s(vertex):
        return vertex.weight * sum(value.num_bytes for value in vertex.results)

    return Network(graph, passes_of(graph), step_s, lambda value: float(value.num_bytes), lambda value: True)


@pytest.mark.parametrize("name", STEPS)
def test_every_choice_has_the_results_of_the_step(name):
    graph = graph_of(STEPS[name], arguments())
    leaves = jax.tree.leaves(arguments())
    wanted = jax.tree.leaves(jax.jit(STEPS[name])(*arguments()))
    candidates = network_of(graph).candidates(most=5)
    assert len(candidates) > 1
    for candidate in candidates:
        results = jax.jit(RematerialisedFunction(graph, candidate.recomputed))(*leaves)
        for result, expected in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_lost_where_every_step_that_can_runs_again():
    graph = graph_of(STEPS["mask and checkpoint"], arguments())
    network = network_of(graph)
    everything = network.candidate(frozenset(network.steps))
    results = jax.jit(RematerialisedFunction(graph, everything.recomputed))(*jax.tree.leaves(arguments()))
    wanted = jax.tree.leaves(jax.jit(STEPS["mask and checkpoint"])(*arguments()))
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["scan", "scan in microbatches"])
def test_a_compiled_scan_keeps_less(name):
    graph, leaves = graph_of(STEPS[name], arguments()), jax.tree.leaves(arguments())

    def temporary_bytes(recomputed):
        compiled = jax.jit(RematerialisedFunction(graph, recomputed)).lower(*leaves).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    candidates = network_of(graph).candidates()
    saved = candidates[0].kept_bytes - candidates[-1].kept_bytes
    assert temporary_bytes(candidates[0].recomputed) - temporary_bytes(candidates[-1].recomputed) > 0.5 * saved
