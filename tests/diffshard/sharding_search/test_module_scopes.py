"""Operations are called by the place of their module, in flax nnx, flax linen and Equinox."""

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import diffshard
from diffshard.plans.layers import layers
from diffshard.plans.summary import operation_name
from diffshard.sharding_search.module_scopes import module_scopes

MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
BATCH = jnp.ones((8, 4))


class Block(nnx.Module):
    """Two products with a nonlinearity between them."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """Blocks in a list, and an embedding that is read by a method."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.table = nnx.Embed(8, 4, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


class Stacked(nnx.Module):
    """Blocks whose parameters are stacked, for a scan over them."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.split(2))

    def __call__(self, x):  # noqa: D102
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class LinenNet(nn.Module):
    """The same in linen."""

    @nn.compact
    def __call__(self, x):  # noqa: D102
        for i in range(2):
            x = x + nn.Dense(4, name=f"down_{i}")(jnp.tanh(nn.Dense(8, name=f"up_{i}")(x)))
        return x


def plan_of(forward, params):
    def step(params, x):
        return jax.grad(lambda p: jnp.square(forward(p, x)).mean())(params)

    jax.jit(step)(params, BATCH)  # what JAX has cached does not stand in the way of the names
    return diffshard.search(step, MESH, hardware="h100", solver="exact").plan(params, BATCH)


def names_of(plan, primitive):
    """The names of all operations of a primitive, without numbers, each once."""
    operations = [i for i, o in enumerate(plan.operations) if o.signature.startswith(f"{primitive}(")]
    return {operation_name(plan, i) for i in operations}


def nnx_plan(model):
    graph, state = nnx.split(model)
    return plan_of(lambda state, x: nnx.merge(graph, state)(x), state)


def test_modules_of_nnx():
    plan = nnx_plan(Net(nnx.Rngs(0)))
    forward = {f"Net/blocks[{i}]/{name}/dot_general" for i in range(2) for name in ("up", "down")}
    forward.add("Net/table.attend/dot_general")
    assert names_of(plan, "dot_general") == forward | {f"backward {name}" for name in forward}
    assert names_of(plan, "tanh") == {"Net/blocks[0]/tanh", "Net/blocks[1]/tanh"}
    members = {layer.name: len(layer.arguments) for layer in layers(plan)}
    assert members["Net/blocks[0]"] == members["Net/blocks[1]"] == 4  # kernels and biases
    assert members["Net/table.attend"] == 1


def test_modules_of_nnx_inside_a_scan_have_the_place_of_their_stack():
    forward = {f"Stacked/blocks/{name}/dot_general" for name in ("up", "down")}
    assert names_of(nnx_plan(Stacked(nnx.Rngs(0))), "dot_general") >= forward


def test_modules_of_linen():
    model = LinenNet()
    plan = plan_of(model.apply, model.init(jax.random.key(0), BATCH))
    names = {f"LinenNet/{name}_{i}/dot_general" for i in range(2) for name in ("up", "down")}
    assert {name.removeprefix("backward ") for name in names_of(plan, "dot_general")} == names


def test_modules_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Part(eqx.Module):
        up: eqx.nn.Linear  # pyright: ignore[reportInvalidTypeForm]
        down: eqx.nn.Linear  # pyright: ignore[reportInvalidTypeForm]

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    class Whole(eqx.Module):
        parts: list

        def __call__(self, x):
            for part in self.parts:
                x = part(x)
            return x

    keys = jax.random.split(jax.random.key(0), 4)
    parts = [Part(eqx.nn.Linear(4, 8, key=keys[i]), eqx.nn.Linear(8, 4, key=keys[i + 1])) for i in (0, 2)]
    params, static = eqx.partition(Whole(parts), eqx.is_array)
    plan = plan_of(lambda params, x: jax.vmap(eqx.combine(params, static))(x), params)
    names = {f"Whole/parts[{i}]/{name}/dot_general" for i in range(2) for name in ("up", "down")}
    assert {name.removeprefix("backward ") for name in names_of(plan, "dot_general")} == names
    assert names_of(plan, "tanh") == {"Whole/parts[0]/tanh", "Whole/parts[1]/tanh"}


def test_nothing_is_called_lambda():
    def step(params, x):
        return jax.tree.map(lambda p: p - (lambda y: y * y)(p) + x.sum(), params)

    plan = diffshard.search(step, MESH, hardware="h100", solver="exact").plan([jnp.ones(4)], BATCH)
    assert "<lambda>" not in str(plan)
    assert names_of(plan, "mul") == {"step/mul"}


def test_classes_are_as_before_and_other_threads_see_no_names():
    calls = Block.__call__, nnx.Linear.__call__, nnx.Embed.attend
    block = Block(nnx.Rngs(0))
    texts = []

    def trace():
        texts.append(str(jax.make_jaxpr(lambda x: block(x))(BATCH).eqns[0].source_info.name_stack))

    with module_scopes():
        assert Block.__call__ is not calls[0]
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
        trace()
    assert (Block.__call__, nnx.Linear.__call__, nnx.Embed.attend) == calls
    assert texts[0] == ""
    assert texts[1] == "Block/up"


class Outer(nnx.Module):
    """A module inside whose call something else is traced or planned."""

    def __init__(self, inside):
        self.block, self.inside = Block(nnx.Rngs(0)), inside

    def __call__(self, x):  # noqa: D102
        y = self.block(x)
        self.inside()
        return jnp.tanh(y)


def first_scope(fn):
    return str(jax.make_jaxpr(fn)(BATCH).eqns[0].source_info.name_stack)


def test_a_plan_that_is_made_while_another_function_is_traced_has_names_of_its_own():
    plans = []
    outer = Outer(lambda: plans.append(nnx_plan(Net(nnx.Rngs(0)))))
    with jax.ensure_compile_time_eval(), module_scopes():
        outer(BATCH)
    assert names_of(plans[0], "tanh") == {"Net/blocks[0]/tanh", "Net/blocks[1]/tanh"}


def test_contexts_inside_each_other_open_each_scope_once():
    call, scopes = Block.__call__, []
    block = Block(nnx.Rngs(0))

    def trace_inside():
        with module_scopes():
            scopes.append(first_scope(block))

    outer = Outer(trace_inside)
    with module_scopes():
        scoped = Block.__call__
        jaxpr = jax.make_jaxpr(outer)(BATCH)
        assert Block.__call__ is scoped is not call
    assert scopes == ["Block/up"]
    assert [str(jaxpr.eqns[i].source_info.name_stack) for i in (0, -1)] == ["Outer/block/up", "Outer"]
    assert Block.__call__ is call


def test_a_function_that_is_traced_may_wait_for_a_thread_that_traces():
    call, scopes = Block.__call__, []
    block = Block(nnx.Rngs(0))

    def trace():
        with module_scopes():
            scopes.append(first_scope(block))

    def trace_in_a_thread():
        thread = threading.Thread(target=trace, daemon=True)
        thread.start()
        thread.join(timeout=60)

    outer = Outer(trace_in_a_thread)
    with module_scopes():
        scopes.append(first_scope(outer))
    assert scopes == ["Block/up", "Outer/block/up"]
    assert Block.__call__ is call


def test_scopes_stay_open_until_the_last_thread_leaves_and_foreign_changes_stay():
    call, entered, may_leave = Block.__call__, threading.Event(), threading.Event()
    scopes = []

    def trace():
        with module_scopes():
            entered.set()
            may_leave.wait(timeout=60)
            scopes.append(first_scope(Block(nnx.Rngs(0))))

    thread = threading.Thread(target=trace, daemon=True)
    with module_scopes():
        thread.start()
        assert entered.wait(timeout=60)

        class Late(Block):
            def __call__(self, x):
                return x * 2

        with module_scopes():
            late = Late(nnx.Rngs(0))
            assert first_scope(late) == "Late"
    assert Block.__call__ is not call
    Late.__call__ = replacement = lambda self, x: x + 1
    may_leave.set()
    thread.join(timeout=60)
    assert scopes == ["Block/up"]
    assert Block.__call__ is call
    assert Late.__call__ is replacement
