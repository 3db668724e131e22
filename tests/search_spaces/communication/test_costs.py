"""What a choice costs, by hand and in parts; seconds of encoding, measured where the device is known."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost.base import Hardware
from cost.collectives import collective_s
from cost.evaluation import evaluate
from cost.validation import validate
from search_spaces.communication.base import INT4, INT8
from search_spaces.communication.call_sites import alternatives
from search_spaces.communication.costs import coding_s, encoding_seconds
from tests.search_spaces.communication.small_communication import (
    BATCH,
    HARDWARE,
    KEY,
    PARAMS,
    SPACE,
    WIDTH,
    seconds,
    sent_bytes,
    small_space,
)


def test_the_roofline_stands_in_for_what_was_not_measured():
    unknown = Hardware("some new device", 1e12, 1e10, 1e10, {})
    assert coding_s(INT4, unknown) == pytest.approx(4.5 / 1e10)
    cpu = Hardware("cpu", 1e12, 1e10, 1e10, {})
    assert coding_s(INT8, cpu) == encoding_seconds()["seconds_per_element"]["cpu"]["int8"]


def test_costs_by_hand():
    problem = SPACE.problem
    validate(problem)
    exact = 2 * collective_s("all_reduce", 8 * WIDTH * 4, 4, HARDWARE.link("model"))
    assert problem.node_cost[0][0] == pytest.approx(float(exact))
    part = 32 + 4  # a fourth of the 128 numbers, and a scale
    link, numbers = HARDWARE.link("model"), 8 * WIDTH
    encoded = collective_s("all_to_all", 4 * part * 4, 4, link) + collective_s("all_gather", 4 * part, 4, link)
    coded = 2 * numbers + numbers / 4 + numbers
    expected = 2 * (float(encoded) + coded * coding_s(INT8, HARDWARE))
    assert problem.node_cost[0][1] == pytest.approx(expected)
    for choice in itertools.product((0, 1), repeat=4):
        assert seconds(SPACE, choice) == pytest.approx(evaluate(problem, list(choice)).cost)
    assert sent_bytes(SPACE, (0, 0, 3, 3)) < sent_bytes(SPACE, (0, 0, 0, 0))


def test_alternatives_choose_a_function_and_its_communication():
    functions = {
        "whole": lambda x: lax.psum(x @ jnp.ones((WIDTH, WIDTH)) / 4, "model"),
        "half": lambda x: 0.5 * x,
    }

    def mixer(params, batch):
        return jnp.square(alternatives("mixer", functions, batch[0] @ params["head"])).mean()

    params = {"head": PARAMS["head"]}
    space = small_space(mixer, params, specs={"head": P()})
    a = next(g for g, group in enumerate(space.groups) if group.names == ("whole", "half"))
    selections = {"whole": 0, "half": 1, "mixed": jnp.array([0.25, 0.75])}
    results = {}
    for name, chosen in selections.items():
        choice = space.exact_choice()
        results[name] = space.loss(params, BATCH, [chosen if g == a else c for g, c in enumerate(choice)], KEY)
    x = BATCH[0] @ params["head"]
    whole, half = x @ jnp.ones((WIDTH, WIDTH)), 0.5 * x
    expected = {"whole": whole, "half": half, "mixed": 0.25 * whole + 0.75 * half}
    for name, y in expected.items():
        assert float(results[name]) == pytest.approx(float(jnp.square(y).mean()), rel=1e-5)
    validate(space.problem)
    exact = space.exact_choice()
    without = [1 if g == a else c for g, c in enumerate(exact)]
    gradient_only = sum(space.problem.node_cost[g][c] for g, c in enumerate(exact))
    assert seconds(space, without) == pytest.approx(gradient_only)
    assert seconds(space, without) < seconds(space, exact)
    first, second = jax.jit(lambda p: space.loss_increases(p, BATCH, KEY))(params)[a]
    assert first == 0 < second


def test_an_explanation_has_one_part_for_each_group():
    for choice in itertools.product((0, 1), repeat=4):
        parts = SPACE.explain(choice)
        assert [part.name for part in parts] == list(SPACE.node_names)
        assert [part.node for part in parts] == [0, 1, 2, 3]
        assert sum(part.seconds for part in parts) == pytest.approx(evaluate(SPACE.problem, choice).cost)
        traffic = [part.traffic for part in parts if part.traffic is not None]
        assert [t.direction for t in traffic] == ["forward", "backward", "gradient", "gradient"]
        assert [t.count for t in traffic] == [2, 2, 1, 1]  # two layers; gradients of a group travel as one vector
        assert sum(t.sent_bytes for t in traffic) == pytest.approx(sent_bytes(SPACE, choice))
    with pytest.raises(ValueError, match="must be a strategy's index"):
        SPACE.explain([jnp.ones(2), 0, 0, 0])  # type: ignore[list-item]


def test_what_lies_in_a_branch_that_does_not_run_is_not_executed():
    def mixer(params, batch):
        def summed(x):
            return alternatives("inner", {"plain": jnp.tanh, "summed": lambda x: lax.psum(x, "model")}, x)

        return jnp.square(alternatives("outer", {"plain": jnp.cos, "in": summed}, batch[0] @ params["head"])).mean()

    space = small_space(mixer, {"head": PARAMS["head"]}, specs={"head": P()})
    nodes = {name: v for v, name in enumerate(space.node_names)}
    outer, inner = (
        next(v for name, v in nodes.items() if f"{label}/alternatives" in name) for label in ("outer", "inner")
    )
    counts = {}
    for chosen in itertools.product((0, 1), repeat=2):
        choice = [dict(zip((outer, inner), chosen, strict=True)).get(v, 0) for v in nodes.values()]
        traffic = {part.name: part.traffic for part in space.explain(choice) if part.traffic}
        counts[chosen] = [t.count for name, t in traffic.items() if "all_reduce forward" in name]
    assert counts == {(0, 0): [0], (0, 1): [0], (1, 0): [0], (1, 1): [1]}


def test_hardware_may_be_the_name_of_a_preset():
    assert seconds(small_space(hardware="h100"), [0, 0, 0, 0]) > 0
