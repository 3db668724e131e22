"""Arrays that are kept as codes for the backward pass: their numbers, their memory by hand, and their seconds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import diffshard
from cost.evaluation import evaluate
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from search_spaces.communication.collectives import decode, encode
from search_spaces.sharding.base import Coded
from search_spaces.sharding.codes import CODES
from search_spaces.sharding.graph import Value
from search_spaces.sharding.kept_codes import LateReads
from search_spaces.sharding.memory import memory_use
from search_spaces.sharding.number_formats import KeptInCodes, MixedProducts

ROWS, WIDTH = 8, 16


def step(weights, x):
    """The backward pass reads the activation: for the weights of the product, and for its own derivative."""

    def loss_of(weights):
        hidden = x @ weights["up"]
        return jnp.mean((jnp.tanh(hidden) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys[:2])
    return {"up": up, "down": down}, jax.random.normal(keys[2], (ROWS, WIDTH))


def rounded(array, name):
    return decode(encode(array, CODES[name]), CODES[name], array.shape[-1])


def space_for(fn, args, num_devices=2):
    mesh = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    hardware = diffshard.preset("h100", dict(mesh.shape))
    options = Options(fn=fn, mesh=mesh, hardware=hardware, memory_limit_bytes=1e12)
    return space_of(options, trace_function(options, args)), mesh


def by_hand(weights, x, name):
    """Returns the gradients where the backward pass has tanh(hidden) as codes."""
    hidden = x @ weights["up"]
    activation = jnp.tanh(hidden)
    kept = rounded(activation, name)
    result = activation @ weights["down"]
    of_result = 2 * result / result.size
    of_hidden = (of_result @ weights["down"].T) * (1 - kept**2)
    return {"up": weights["up"] - 0.1 * x.T @ of_hidden, "down": weights["down"] - 0.1 * kept.T @ of_result}


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_the_backward_pass_has_the_numbers_of_codes(name):
    args = arrays()
    space, mesh = space_for(step, args)
    residuals = [space.graph.vertices[r.value.vertex] for r in space.residuals.of_value.values()]
    (tanh,) = (vertex for vertex in residuals if vertex.primitive == "tanh")
    layout = space.layout([0] * len(space.nodes)).with_formats([Coded(tanh.index, name, "kept")])
    down, up, loss = jax.jit(space.device_program(layout, mesh))(*jax.tree.leaves(args))
    exact = step(*args)
    expected = by_hand(*args, name)
    np.testing.assert_allclose(down, expected["down"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(up, expected["up"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, exact[1], rtol=1e-6)
    assert np.abs(down - exact[0]["down"]).max() > 1e-6


def test_one_device_measures_the_numbers_of_the_program():
    args = arrays()
    space, mesh = space_for(step, args)
    residuals = list(space.residuals.of_value.values())
    rows = {r.value.vertex: row for row, r in enumerate(residuals)}
    layout = space.layout([0] * len(space.nodes))
    kept = KeptInCodes(["int8"], space.residuals.late_reads({r.value.id: "" for r in residuals}))
    mixed = MixedProducts(space.graph, layout, rows, [], kept=kept)
    for on in ([], residuals[:1], residuals):
        weights = np.zeros((len(rows), 1), np.float32)
        weights[[rows[r.value.vertex] for r in on]] = 1.0
        program = space.device_program(layout.with_formats([Coded(r.value.vertex, "int8", "kept") for r in on]), mesh)
        expected = jax.jit(program)(*jax.tree.leaves(args))
        results, _ = jax.jit(mixed)(weights, {}, *jax.tree.leaves(args))
        for result, array in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, array, rtol=1e-5, atol=1e-6)


def test_what_is_computed_inside_its_readers_is_computed_again_of_codes():
    """The derivative of x² reads x · 2, which is not in memory: it is x that is kept."""

    def squares(weights, x):
        gradient = jax.grad(lambda w: jnp.sum(((x @ w) ** 2) @ w))(weights)
        return weights - 0.1 * gradient

    weights, x = arrays()
    args = weights["up"], x
    space, mesh = space_for(squares, args)
    (hidden,) = (
        r for r in space.residuals.of_value.values() if space.graph.vertices[r.value.vertex].primitive == "dot_general"
    )
    assert space.residuals.late_reads({hidden.value.id: "int8"}).again
    layout = space.layout([0] * len(space.nodes)).with_formats([Coded(hidden.value.vertex, "int8", "kept")])
    result = jax.jit(space.device_program(layout, mesh))(*args)[0]
    first = x @ args[0]
    kept = rounded(first, "int8")
    ones = jnp.ones((ROWS, WIDTH))
    of_first = 2 * kept * (ones @ args[0].T)
    expected = args[0] - 0.1 * (x.T @ of_first + (first**2).T @ ones)  # the squares are in memory by themselves
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_the_memory_and_the_seconds_of_kept_codes_by_hand():
    args = jax.eval_shape(lambda: (arrays()[0], jnp.zeros((4096, WIDTH))))
    space, _ = space_for(step, args)
    (residual,) = (
        r for r in space.residuals.of_value.values() if space.graph.vertices[r.value.vertex].primitive == "tanh"
    )
    key = Coded(residual.value.vertex, "int8", "kept")
    free = space.with_formats({key: 3.0})
    shared = free.node_of(key)
    exact = [0] * len(free.nodes)
    coded = list(exact)
    coded[shared] = free.strategy_numbers(shared)[free.nodes[shared].strategies[0]._replace(kept_in="int8")]
    num_bytes = 4 * 4096 * WIDTH
    coding_s = 2 * 1.25 * num_bytes / free.hardware.reached_memory_bytes_per_s + 2 * free.hardware.kernel_launch_s
    added_s = evaluate(free.problem, coded).cost - evaluate(free.problem, exact).cost
    assert added_s == pytest.approx(3.0 + coding_s)
    predicted = free.predict(coded)
    assert predicted.compute_s.sum() - free.predict(exact).compute_s.sum() == pytest.approx(coding_s)

    def held(choice, position):
        use = memory_use(free.usages, choice)
        return use.num_bytes[np.searchsorted(use.times, position + 1, side="right") - 1]

    assert residual.last_forward < residual.first_late - 1
    between = residual.last_forward + 1
    assert held(exact, between) - held(coded, between) == pytest.approx(num_bytes * 3 / 4)
    assert held(coded, residual.last_forward) - held(exact, residual.last_forward) == pytest.approx(num_bytes / 4)
    assert held(coded, residual.first_late) - held(exact, residual.first_late) == pytest.approx(num_bytes / 4)
    assert free.layout(coded).coded == {key}
    assert free.late_reads(free.layout(exact)) == LateReads()


LAYERS = 3


def scanned_step(weights, x):
    def loss_of(weights):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)[0] ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def scanned_arguments():
    keys = jax.random.split(jax.random.key(3))
    return jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4, jax.random.normal(keys[1], (ROWS, WIDTH))


def scanned_by_hand(weights, x, name):
    """Returns the new weights where the backward pass has each layer's input and cosine as codes."""
    inputs, cosines = [x], []
    for w in weights:
        cosines.append(jnp.cos(inputs[-1] @ w))
        inputs.append(jnp.sin(inputs[-1] @ w))
    cotangent, gradients = 2 * inputs[-1] / inputs[-1].size, []
    for w, before, cosine in reversed(list(zip(weights, inputs, cosines, strict=False))):
        of_product = cotangent * rounded(cosine, name)
        gradients.append(rounded(before, name).T @ of_product)
        cotangent = of_product @ w.T
    return weights - 0.1 * jnp.stack(gradients[::-1])


def test_a_loop_stacks_codes_and_another_reads_them():
    args = scanned_arguments()
    space, mesh = space_for(scanned_step, args)
    residuals = list(space.residuals.of_value.values())
    stacks = [space.graph.vertices[r.value.vertex] for r in residuals]
    assert [stack.kind for stack in stacks] == ["stack"] * 2
    layout = space.layout([0] * len(space.nodes))
    kept = KeptInCodes(["int8"], space.residuals.late_reads({r.value.id: "" for r in residuals}))
    mixed = jax.jit(MixedProducts(space.graph, layout, {v.index: i for i, v in enumerate(stacks)}, [], kept=kept))
    for is_on in (True, False):
        keys = [Coded(stack.index, "int8", "kept") for stack in stacks] if is_on else []
        program = jax.jit(space.device_program(layout.with_formats(keys), mesh))
        expected = scanned_by_hand(*args, "int8") if is_on else scanned_step(*args)[0]
        new, loss = program(*args)
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss, scanned_step(*args)[1], rtol=1e-6)
        measured, _ = mixed(np.full((2, 1), float(is_on), np.float32), {}, *args)
        np.testing.assert_allclose(measured[0], expected, rtol=1e-4, atol=1e-6)
        has_codes = f"s8[{LAYERS},{ROWS},1,{WIDTH}]" in str(program.lower(*args).compile().as_text())
        assert has_codes == is_on
    assert not np.allclose(scanned_by_hand(*args, "int8"), scanned_step(*args)[0], rtol=1e-4, atol=1e-6)


def test_a_stack_that_is_split_otherwise_by_its_reader_is_decoded_before():
    args = scanned_arguments()
    space, mesh = space_for(scanned_step, args)
    stacks = [space.graph.vertices[r.value.vertex] for r in space.residuals.of_value.values()]
    layout = space.layout([0] * len(space.nodes)).with_formats([Coded(s.index, "int8", "kept") for s in stacks])
    strategies = list(layout.strategies)
    for stack in stacks:
        ((reader, _),) = space.graph.consumers()[stack.results[0].id]
        split = next(s for s in space.nodes[reader.index].strategies if s.operands[0] == ((), (0,), ()))
        strategies[reader.index] = split._replace(reductions=((),), results=split.unreduced)
    specs = list(layout.value_specs)
    for vertex, strategy in zip(space.graph.vertices, strategies, strict=True):
        for value, spec in zip(vertex.results, strategy.results, strict=True):
            specs[value.id] = spec
    layout = layout._replace(strategies=tuple(strategies), value_specs=tuple(specs))
    new = jax.jit(space.device_program(layout, mesh))(*args)[0]
    np.testing.assert_allclose(new, scanned_by_hand(*args, "int8"), rtol=1e-4, atol=1e-6)


def test_the_memory_and_the_seconds_of_a_stack_of_codes_by_hand():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 64, 64), (256, 64))]
    space, _ = space_for(scanned_step, tuple(shapes), num_devices=2)
    (residual, *_) = space.residuals.of_value.values()
    key = Coded(residual.value.vertex, "int8", "kept")
    free = space.with_formats({key: 0.25})
    node, vertex = free.node_of(key), free.graph.vertices[key.vertex]
    numbers, (exact, *_) = free.strategy_numbers(node), free.nodes[node].strategies
    own, coded = numbers[exact], numbers[exact._replace(kept_in="int8")]
    whole = 4 * 256 * 64 * 4
    (usage,) = (u for n, u in zip(free.usages.node, free.usages.num_bytes, strict=True) if n == node)
    assert (usage[own], usage[coded]) == (whole, whole / 4)
    hardware = free.hardware
    added_s = free.problem.node_cost[node][coded] - free.problem.node_cost[node][own]
    bytes_s = 2 * whole * 1.25 / hardware.reached_memory_bytes_per_s  # written and read once each, in four trips
    assert added_s == pytest.approx(0.25 + bytes_s + 4 * 2 * hardware.kernel_launch_s)
    choice = [0] * len(free.nodes)
    choice[node] = coded
    predicted = free.predict(choice)
    seconds = predicted.compute_s.sum() + sum(t.seconds for t in predicted.transfers) + predicted.preference_s.sum()
    assert evaluate(free.problem, choice).cost == pytest.approx(seconds + 0.25)
    steps = free.program_steps(free.layout(choice))
    of_stack = [s.seconds for s, o in zip(steps.steps, steps.origins, strict=True) if o.vertex == vertex.index]
    assert sum(of_stack) == pytest.approx(free.node_costs.compute_s(vertex, [exact])[0] + added_s - 0.25)


def test_a_stack_that_is_a_result_or_read_by_the_forward_pass_stays():
    def step(weights, x):
        def loss_of(weights):
            states = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), jnp.sin(h)), x, weights)[1]
            return jnp.mean(states**2), states

        (_, states), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return weights - 0.1 * gradient, states

    space, _ = space_for(step, scanned_arguments())
    kept = {r.value.id for r in space.residuals.of_value.values()}
    outputs = {output.id for output in space.graph.outputs if isinstance(output, Value)}
    assert kept
    assert not kept & outputs
