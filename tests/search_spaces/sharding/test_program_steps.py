"""The steps of device programs: what runs on which stream, for how long, and after what."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import diffshard
from cost.base import Hardware, Link
from cost.streams import COMPUTE, play
from search_spaces.sharding import scheduling
from search_spaces.sharding.program_steps import BETWEEN_HOSTS, INSIDE_HOST
from tests.search_spaces.sharding.small_spaces import EXAMPLES, array, hardware_of, space_of

WIDTH, ROWS = 32, 4096


def overlapping(names, **options):
    return dataclasses.replace(hardware_of(names, **options), exposed_share=0.25)


def steps_of(space, choice=None):
    if choice is None:
        choice = diffshard.solve(space.problem, solver="exact", time_limit_s=30).choice
    return space.program_steps(space.layout(choice))


def seconds_on(program, stream):
    return sum(step.seconds for step in program.steps if stream in step.streams)


@pytest.mark.parametrize("name", EXAMPLES)
def test_arithmetic_is_what_the_plan_says_and_reads_come_before(name):
    function, arguments = EXAMPLES[name]
    space = space_of(function, *arguments, hardware=overlapping("xy"))
    program = steps_of(space, [0] * len(space.nodes))
    compute_s = space.predict([0] * len(space.nodes)).compute_s.sum()
    assert seconds_on(program, COMPUTE) == pytest.approx(compute_s)
    assert all(j < i for i, step in enumerate(program.steps) for j in step.reads)
    assert play(program.steps).seconds >= compute_s * (1 - 1e-9)
    assert space.least_compute_s <= compute_s * (1 + 1e-9)


def dense(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def test_a_weight_is_gathered_beside_the_product_before(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    hardware = overlapping("x", latency_s=0.0, flops_per_s=1e9)
    split = dict.fromkeys(range(4), ((0,), ()))
    space = space_of(dense, [array(WIDTH, WIDTH)] * 3, array(ROWS, WIDTH), sizes=(8,), given=split, hardware=hardware)
    program = steps_of(space)
    played = play(program.steps)
    gathers = [i for i, origin in enumerate(program.origins) if origin.kind == "all_gather"]
    products = [
        i for i, origin in enumerate(program.origins)
        if origin.kind == "compute" and space.graph.vertices[origin.vertex].primitive == "dot_general"
    ]  # fmt: skip
    gathered_s = WIDTH * WIDTH * 4 * 7 / 8 * 1e-9
    assert [program.steps[i].seconds for i in gathers] == pytest.approx([gathered_s] * 3)
    # Those of the first two weights start with the step, and the first product waits for its own; nothing else waits.
    assert played.start_s[products[0]] <= 2 * gathered_s
    assert sum(wait.seconds for wait in played.waits) == pytest.approx(played.start_s[products[0]])
    last = max(gathers, key=lambda i: played.start_s[i])
    assert played.start_s[products[0]] <= played.start_s[last] < played.end_s[last] <= played.start_s[products[2]]


def test_a_loop_takes_as_long_as_its_trips():
    # A product of rows that are split gathers its slice of the weights in each trip; nothing can run beside that.
    def scanned(weights, x):
        return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

    def once(weights, x):
        return jnp.tanh(x @ weights[0])

    def played(function, trips):
        given = {0: ((), (0,), ()), 1: ((0,), ())}
        arguments = array(trips, WIDTH, WIDTH), array(ROWS, WIDTH)
        hardware = overlapping("x", flops_per_s=1e9)
        return play(steps_of(space_of(function, *arguments, sizes=(8,), given=given, hardware=hardware)).steps)

    assert played(scanned, 6).seconds == pytest.approx(2 * played(scanned, 3).seconds, rel=1e-3)
    assert sum(w.seconds for w in played(scanned, 6).waits) == pytest.approx(
        6 * sum(w.seconds for w in played(once, 1).waits), rel=0.05
    )


def test_axes_inside_a_host_share_a_link_and_those_between_hosts_have_their_own():
    links = {"x": Link(0.0, 1e-9, num_hosts=2), "y": Link(0.0, 1e-9), "z": Link(0.0, 1e-9, num_hosts=2)}
    hardware = Hardware("hosts", 1e9, 1e12, float("inf"), links, exposed_share=0.25)
    arguments = [array(WIDTH, WIDTH)] * 3, array(ROWS, WIDTH)
    given = {0: ((0,), ()), 1: ((1,), ()), 2: ((2,), ()), 3: ((), ())}
    space = space_of(dense, *arguments, sizes=(2, 2, 4), given=given, hardware=hardware)
    program = steps_of(space)
    streams = {
        origin.axes: step.streams
        for step, origin in zip(program.steps, program.origins, strict=True) if origin.kind == "all_gather"
    }  # fmt: skip
    assert streams == {(0,): (BETWEEN_HOSTS,), (1,): (INSIDE_HOST,), (2,): (INSIDE_HOST, BETWEEN_HOSTS)}
