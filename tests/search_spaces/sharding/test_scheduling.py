"""Schedules: which collectives of a device program wait for which windows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import diffshard
from cost.base import Hardware, Link
from search_spaces.sharding import scheduling
from search_spaces.sharding.graph import Vertex, is_contraction, leads_to_contraction
from search_spaces.sharding.schedule import Windows, straight_lines
from search_spaces.sharding.scheduling import held_positions
from tests.search_spaces.sharding.small_spaces import array, graph_of, hardware_of, space_of

LAYERS, WIDTH, ROWS = 5, 32, 4096


def training_step(weights, x):
    """Gradient descent on dense layers, each rematerialised, whose weights are stored in float32."""

    def loss(weights):
        y = x
        for w in weights:
            y = jax.checkpoint(lambda y, w: jnp.tanh(y @ w.astype(jnp.bfloat16)))(y, w)
        return y.astype(jnp.float32).sum()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.fixture
def program(monkeypatch):
    """The step on 8 devices with weights and rows split (FSDP), and a barrier after every contraction."""
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    arguments = [array(WIDTH, WIDTH) for _ in range(LAYERS)], array(ROWS, WIDTH, dtype=jnp.bfloat16)
    split = dict.fromkeys(range(LAYERS + 1), ((0,), ()))
    space = space_of(training_step, *arguments, sizes=(8,), given=split, hardware=hardware)
    solution = diffshard.solve(space.problem, solver="exact", time_limit_s=30)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return space.device_program(space.layout(solution.choice), mesh)


def body_of(program):
    """The equations that each device runs."""
    arguments = [jax.ShapeDtypeStruct(v.results[0].shape, v.results[0].dtype) for v in program.graph.inputs]
    (outer,) = jax.make_jaxpr(lambda *arrays: program(*arrays))(*arguments).jaxpr.eqns
    return getattr(outer.params["jaxpr"], "jaxpr", outer.params["jaxpr"]).eqns


def depends_on(equations):
    """For each equation the set of equations that it depends on."""
    made_by, before = {}, []
    for i, equation in enumerate(equations):
        parents = {made_by[v] for v in equation.invars if not hasattr(v, "val") and v in made_by}
        before.append(parents.union(*(before[p] for p in parents)))
        made_by.update(dict.fromkeys(equation.outvars, i))
    return before


def places(equations, name):
    return [i for i, equation in enumerate(equations) if equation.primitive.name == name]


def test_weights_are_gathered_one_window_before_their_product(program):
    equations = body_of(program)
    before = depends_on(equations)
    gathers, products = places(equations, "all_gather"), places(equations, "dot_general")
    assert len(gathers) == 2 * LAYERS  # in the forward and in the backward pass
    num_earlier, num_beside = [], []
    for gather in gathers:
        reader = next(p for p in products if gather in before[p])
        earlier = {p for p in products if p in before[gather]}
        num_earlier.append(len(earlier))
        num_beside.append(sum(p in before[reader] and p not in earlier for p in products))
    assert num_beside.count(0) == 1, "only the first product's weight has nothing to run beside"
    assert max(num_beside) <= 3, "a gather starts earlier than it needs to"
    assert num_earlier.count(0) == 2, "only the weights of the first two products are gathered at once"


def test_gradients_are_reduced_beside_the_next_product(program):
    equations = body_of(program)
    before = depends_on(equations)
    products = places(equations, "dot_general")
    scatters = places(equations, "reduce_scatter")
    assert len(scatters) == LAYERS
    barriers = places(equations, "optimization_barrier")
    for scatter in scatters[:-1]:
        after = [b for b in barriers if scatter in before[b]]
        assert after, "nothing forces the reduction to end"
        # A later product waits for that barrier, so the reduction ends while the backward pass still runs.
        assert any(after[0] in before[p] for p in products)


def test_no_collective_is_added_or_lost(program, monkeypatch):
    scheduled = [equation.primitive.name for equation in body_of(program)]
    monkeypatch.setattr(program, "schedule", type(program.schedule)())
    free = [equation.primitive.name for equation in body_of(program)]
    for kind in ("all_gather", "reduce_scatter", "psum", "all_to_all", "dot_general"):
        assert scheduled.count(kind) == free.count(kind)
    assert scheduled.count("optimization_barrier") > free.count("optimization_barrier")


def test_windows_end_after_products_on_which_others_depend():
    def fn(a, b, c):
        hidden = a @ b
        aside = a.T @ hidden
        return (hidden @ c).sum(), aside

    graph = graph_of(fn, *[array(8, 8)] * 3)
    (line,) = straight_lines(graph.block)
    windows = Windows(line, np.ones(len(graph.vertices)), leads_to_contraction(graph), 1.0)
    products = [i for i, (step, _) in enumerate(line) if isinstance(step, Vertex) and is_contraction(step)]
    assert windows.start == [0, products[0] + 1]
    assert windows.seconds == [1.0, 2.0]
    assert [windows.of_place[place] for place in products[:2]] == [0, 1]


def test_loops_have_lines_of_their_own():
    def fn(x):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), x, length=3)[0] @ x

    lines = list(straight_lines(graph_of(fn, array(8, 8)).block))
    assert len(lines) == 2
    assert [sum(getattr(step, "primitive", "") == "dot_general" for step, _ in line) for line in lines] == [1, 1]


@pytest.mark.parametrize("exposed_share", [0.25, 1.0])
def test_weights_take_memory_from_the_window_before_their_reader(exposed_share, monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    weights, x = [array(WIDTH, WIDTH) for _ in range(LAYERS)], array(ROWS, WIDTH, dtype=jnp.bfloat16)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0), exposed_share=exposed_share)
    space = space_of(training_step, weights, x, sizes=(8,), hardware=hardware)
    held = held_positions(space.graph, (8,), hardware, space.reshard_costs.path)
    if exposed_share == 1.0:
        assert held == ({}, {})
        return
    positions = held.fetch_from
    readers = space.graph.consumers()
    products = [v for v in space.graph.operations() if is_contraction(v)]
    bfloat16_weights = [v for v in space.graph.values if v.shape == (WIDTH, WIDTH) and v.dtype == jnp.bfloat16]
    gathers = [v for v in bfloat16_weights if v.id in positions]
    assert len(gathers) >= LAYERS
    for value in gathers[1:]:
        first_reader = min(reader.position for reader, _ in readers[value.id])
        beside = [p for p in products if positions[value.id] <= p.position < first_reader]
        assert 1 <= len(beside) <= 4


def test_windows_are_at_least_as_long_as_they_should_be():
    def fn(x, w):
        for _ in range(7):
            x = jnp.tanh(x @ w)
        return x

    graph = graph_of(fn, array(8, 8), array(8, 8))
    (line,) = straight_lines(graph.block)
    windows = Windows(line, np.full(len(graph.vertices), 0.25), leads_to_contraction(graph), 0.7)
    # Three products are 0.75 s, and each is followed by a tanh; the last product is in a window of its own.
    assert windows.start == [0, 5, 11]
    assert windows.seconds == [0.75, 0.75, 0.25]


def test_each_rematerialised_region_of_a_line_has_a_number():
    graph = graph_of(training_step, [array(8, 8)] * 3, array(8, 8, dtype=jnp.bfloat16))
    (line,) = straight_lines(graph.block)
    products = [region for step, region in line if isinstance(step, Vertex) and is_contraction(step)]
    outside, *regions = dict.fromkeys(products)
    assert outside == 0
    assert len(regions) == 3


def chain_of_products(gather_s, num_products=8):
    """In which barrier each weight's gather starts, if each product takes a second: all rows and weights are split."""

    def fn(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    weight = array(WIDTH, WIDTH)
    # A gather over 8 devices receives 7/8 of a weight.
    link = Link(0.0, gather_s / (7 / 8 * WIDTH * WIDTH * 4))
    hardware = Hardware("test", 1e9, 1e9, float("inf"), {"x": link}, exposed_share=0.25)
    given = dict.fromkeys(range(num_products + 1), ((0,), ()))
    space = space_of(fn, [weight] * num_products, array(64, WIDTH), sizes=(8,), hardware=hardware, given=given)
    rows = ((0,), ())
    choice = [0] * len(space.nodes)
    for node, index in ((node, i) for i, node in enumerate(space.nodes)):
        specs = [(s.operands, s.results) for s in node.strategies]
        if node.vertex.primitive == "dot_general":
            choice[index] = specs.index(((rows, ((), ())), (rows,)))
        elif node.vertex.kind == "operation":
            choice[index] = specs.index(((rows,), (rows,)))
    seconds = np.array([float(is_contraction(v)) for v in space.graph.vertices])
    path, is_written = space.reshard_costs.path, space.lifetimes.is_written
    schedule = scheduling.make_schedule(space.graph, space.layout(choice), path, seconds, is_written)
    return {
        stage.fetch.root.vertex: number
        for number, barrier in enumerate(schedule.barriers[i] for i in sorted(schedule.barriers))
        for stage in barrier.stages
    }


@pytest.mark.parametrize(
    ("gather_s", "windows"),
    [
        (0.5, [0, 1, 2, 3, 4, 5, 6]),  # beside the product before
        # From the last to the first: two windows for each of the last three, and what is left for the others.
        (2.0, [0, 0, 0, 0, 1, 3, 5]),
        # No gather starts more than six windows before its product, however long it takes.
        (20.0, [0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_gathers_take_the_windows_before_their_product_in_which_links_are_free(gather_s, windows, monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    starts = chain_of_products(gather_s)
    assert [starts[weight] for weight in range(1, 8)] == windows


def test_what_a_window_gathers_and_reduces_passes_its_barriers(program):
    equations = body_of(program)
    maker = {v: equation for equation in equations for v in equation.outvars}
    cheap = ("convert_element_type", "reshape", "transpose", "squeeze")

    def source(equation):
        """What makes the operand of an equation, behind operations that move one array."""
        equation = maker[equation.invars[0]]
        return source(equation) if equation.primitive.name in cheap else equation

    readers = [
        [reader.primitive.name for reader in equations if any(v is equation.outvars[0] for v in reader.invars)]
        for equation in equations
        if equation.primitive.name == "all_gather"
    ]
    # One gather has no window before its product; the others end at the barrier before theirs.
    assert sum("optimization_barrier" not in names for names in readers) <= 1
    scatters = [equation for equation in equations if equation.primitive.name == "reduce_scatter"]
    late = [source(equation).primitive.name == "optimization_barrier" for equation in scatters]
    assert late.count(True) >= LAYERS - 1, "a gradient is reduced before its window ends"


def test_windows_of_the_memory_model_count_one_devices_share_of_each_product(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 1)

    def fn(weights, x):
        for w in weights:
            x = x @ w
        return x

    weights, x = [array(8, 8)] * 6, array(8, 8)
    # A product has 2 * 8^3 = 1024 operations: 1024 s on one device, 256 s on each of four. The latency of 400 s of
    # the slowest link makes windows of two products.
    links = {"x": Link(400.0, 0.0), "y": Link(1.0, 0.0)}
    hardware = Hardware("test", 1.0, 1.0, float("inf"), links, exposed_share=0.25)
    space = space_of(fn, weights, x, sizes=(2, 2), hardware=hardware)
    positions = held_positions(space.graph, (2, 2), hardware, space.reshard_costs.path).fetch_from
    # In the first window a weight is there when it is read; afterwards from the start of the window before.
    assert [positions[v.results[0].id] for v in space.graph.inputs[:6]] == [0, 1, 0, 0, 2, 2]


def test_gradients_are_held_until_the_window_after_their_product_has_ended(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)  # a window ends after every product that others need
    weights, x = [array(WIDTH, WIDTH) for _ in range(LAYERS)], array(ROWS, WIDTH, dtype=jnp.bfloat16)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0), exposed_share=0.25)
    space = space_of(training_step, weights, x, sizes=(8,), hardware=hardware)
    until = held_positions(space.graph, (8,), hardware, space.reshard_costs.path).reduce_until
    products = [v for v in space.graph.operations() if is_contraction(v)]
    gradients = [v for v in products if v.results[0].id in until and v.results[0].shape == (WIDTH, WIDTH)]
    assert len(gradients) == LAYERS
    for number, vertex in enumerate(gradients[:-1]):
        later = [p for p in products if vertex.position < p.position <= until[vertex.results[0].id]]
        assert 1 <= len(later) <= 4, number
    held = [
        (interval, num_bytes)
        for value, interval, num_bytes in zip(
            space.usages.value, space.usages.interval, space.usages.num_bytes, strict=True
        )
        if value == gradients[0].results[0].id
    ]
    # 32 x 32 numbers of two bytes: whole on each device until they are reduced, an eighth of that if scattered.
    whole, scattered = 2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH / 8
    assert any(
        max(num_bytes) == whole - scattered and end == until[gradients[0].results[0].id] + 2
        for (_, end), num_bytes in held
    )


def test_what_is_read_much_later_is_made_before_the_window_after_the_next(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)  # a window ends after every product that others need

    def fn(weights, x):
        skipped, y = jnp.split(x @ weights[0], 2, axis=1)
        scale = (y * y).sum(axis=0)
        for w in weights[1:]:
            y = jnp.tanh(y @ w)
        return y + skipped, scale

    weights = [array(8, 16), *[array(8, 8)] * 6]
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0), exposed_share=0.25)
    space = space_of(fn, weights, array(16, 8), sizes=(2,), hardware=hardware)
    graph = space.graph
    schedule = space.device_program(space.layout([0] * len(space.nodes)), AbstractMesh((2,), ("x",))).schedule
    barriers = [schedule.barriers[index] for index in sorted(schedule.barriers)]
    late = {}
    for number, barrier in enumerate(barriers):
        for value in barrier.values:
            maker = graph.vertices[value.vertex]
            if not is_contraction(maker):
                late.setdefault(maker.primitive, []).append((number, value.result))
    # The first product ends window 0. Window 1 splits it and sums; window 2 may still do so, and barrier 3 may not. The
    # other half of the split and each tanh are read at once, and the square is computed inside the sum.
    assert late == {"split": [(3, 0)], "reduce_sum": [(3, 0)]}


def test_partial_gradients_of_biases_are_there_before_later_products(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def step(weights, biases, x):
        def loss(weights, biases):
            y = x
            for w, b in zip(weights, biases, strict=True):
                y = jax.checkpoint(lambda y, w, b: jnp.tanh(y @ w + b))(y, w, b)
            return (y**2).sum()

        return jax.grad(loss, argnums=(0, 1))(weights, biases)

    arguments = [array(WIDTH, WIDTH)] * LAYERS, [array(WIDTH)] * LAYERS, array(ROWS, WIDTH)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    given = {2 * LAYERS: ((0,), ())}
    space = space_of(step, *arguments, sizes=(8,), given=given, hardware=hardware)
    solution = diffshard.solve(space.problem, solver="exact", time_limit_s=30)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    program = space.device_program(space.layout(solution.choice), mesh)
    equations = body_of(program)
    before = depends_on(equations)
    products = places(equations, "dot_general")
    sums = [i for i in places(equations, "reduce_sum") if equations[i].outvars[0].aval.shape == (WIDTH,)]
    assert len(sums) == LAYERS
    forced = [any(i in before[p] for p in products) for i in sums]
    # The sums of the last windows of the backward pass have no window behind them that could wait.
    assert forced[:3] == [True] * 3


@pytest.mark.parametrize("dimension", [0, 1])
def test_what_passes_a_barrier_lies_as_its_readers_want_it(dimension, monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    arguments = [array(WIDTH, WIDTH) for _ in range(LAYERS)], array(ROWS, WIDTH, dtype=jnp.bfloat16)
    stored = ((0,), ()) if dimension == 0 else ((), (0,))
    given = {**dict.fromkeys(range(LAYERS), stored), LAYERS: ((0,), ())}
    space = space_of(training_step, *arguments, sizes=(8,), given=given, hardware=hardware)
    solution = diffshard.solve(space.problem, solver="exact", time_limit_s=30)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    equations = body_of(space.device_program(space.layout(solution.choice), mesh))
    maker = {v: equation for equation in equations for v in equation.outvars}

    def order_in_memory(variable):
        """The dimensions of what a program constrains, the slowest first; None for other arrays."""
        equation = maker.get(variable)
        if equation is None or equation.primitive.name != "layout_constraint":
            return None
        return equation.params["layout"].major_to_minor

    scatters = [equation for equation in equations if equation.primitive.name == "reduce_scatter"]
    orders = []
    for scatter in scatters:
        barrier = maker[scatter.invars[0]]
        if barrier.primitive.name == "optimization_barrier":
            order = order_in_memory(barrier.invars[barrier.outvars.index(scatter.invars[0])])
            assert order is not None
            orders.append(order[0] == scatter.params["scatter_dimension"])
    assert len(orders) >= LAYERS - 1
    assert all(orders)
    joined = [v for equation in equations if equation.primitive.name == "optimization_barrier" for v in equation.invars]
    gradients = [v for v in joined if v.aval.shape in ((4, 32), (32, 4)) and order_in_memory(v) is not None]
    assert gradients, "no reduced gradient passes a barrier"
    assert {order_in_memory(v) for v in gradients} == {(0, 1)}  # as the weights lie that they update


def test_embeddings_that_are_sent_to_all_lie_in_their_own_order(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def fn(table, weights, tokens):
        x = table[tokens]
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    rows = array(4096, 64), [array(64, 64)] * 3, jax.ShapeDtypeStruct((128, 8), jnp.int32)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    space = space_of(fn, *rows, sizes=(8,), given={0: ((), (0,)), 4: ((0,), ())}, hardware=hardware)
    solution = diffshard.solve(space.problem, solver="exact", time_limit_s=30)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    equations = body_of(space.device_program(space.layout(solution.choice), mesh))
    (sent,) = (e.outvars[0] for e in equations if e.primitive.name == "all_to_all" and e.outvars[0].aval.ndim == 3)
    (reader,) = (equation for equation in equations if any(v is sent for v in equation.invars))
    assert reader.primitive.name == "layout_constraint"
    assert reader.params["layout"].major_to_minor == (0, 1, 2)


def test_a_weight_that_a_shared_reshard_moves_is_gathered_from_there(monkeypatch):
    monkeypatch.setattr(scheduling, "_LATENCIES_IN_WINDOW", 0)

    def fn(weights, x):
        for w in weights:
            w = w.astype(jnp.bfloat16)
            x = jnp.tanh(x @ w) @ w
        return x

    rows, columns, whole = ((0,), ()), ((), (0,)), ((), ())
    arguments = [array(WIDTH, WIDTH) for _ in range(3)], array(ROWS, WIDTH, dtype=jnp.bfloat16)
    hardware = dataclasses.replace(hardware_of("x", latency_s=0.0, flops_per_s=1e9), exposed_share=0.25)
    given = {**dict.fromkeys(range(3), columns), 3: rows}
    space = space_of(fn, *arguments, sizes=(8,), given=given, hardware=hardware)
    choice = [0] * len(space.nodes)
    for index, node in enumerate(space.nodes):
        specs = [(s.operands, s.results) for s in node.strategies]
        where = columns if node.vertex.primitive == "convert_element_type" else rows
        if node.vertex.primitive == "dot_general":
            choice[index] = specs.index(((rows, whole), (rows,)))
        elif ((where,), (where,)) in specs:
            choice[index] = specs.index(((where,), (where,)))
    layout = space.layout(choice)
    converted = {v.results[0].id for v in space.graph.operations() if v.primitive == "convert_element_type"}
    moved = [rows if i in converted else spec for i, spec in enumerate(layout.value_specs)]
    layout = layout._replace(value_specs=moved)
    program = space.device_program(layout, jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)))
    assert any(stage.fetch.chain for barrier in program.schedule.barriers.values() for stage in barrier.stages)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in jax.random.split(jax.random.key(0), 3)]
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    (result,) = jax.jit(lambda *arrays: program(*arrays))(*weights, x)
    np.testing.assert_allclose(np.float32(result), np.float32(fn(weights, x)), atol=0.02)
