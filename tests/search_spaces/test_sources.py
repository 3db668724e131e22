"""Notes name the line of the user's code that they are about, not a line of a library that it calls."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from diffshard.sharding_search.module_scopes import module_scopes
from search_spaces import replay
from search_spaces.replay import function_source, user_source

HERE = str(Path(__file__))
MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))


def line_of(text):
    """The number of the only line of this file that ends with a text."""
    (number,) = [i for i, line in enumerate(Path(HERE).read_text().splitlines(), 1) if line.endswith(text)]
    return number


class Net(nn.Module):
    """A dense layer."""

    @nn.compact
    def __call__(self, x):  # noqa: D102
        return nn.Dense(4)(x)  # the layer


class Gated(nnx.Module):
    """A recurrent cell of nnx."""

    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(4, 4, rngs=rngs)

    def __call__(self, state, x):  # noqa: D102
        return self.cell(state, x)[0]  # the cell


def step(params, x):
    gradients = jax.grad(lambda p: Net().apply(p, x).mean())(params)  # pyright: ignore[reportAttributeAccessIssue]
    x = jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, x)  # the loop
    x = jax.lax.cond(x.sum() > 1, jnp.sin, jnp.cos, x)  # the branch
    return optax.apply_updates(params, gradients), x


def test_the_innermost_line_outside_libraries():
    params = Net().init(jax.random.key(0), jnp.ones((4, 4)))
    jaxpr = jax.make_jaxpr(lambda p, x: Net().apply(p, x))(params, jnp.ones((4, 4)))
    assert {user_source(e) for e in jaxpr.eqns} == {f"{HERE}:{line_of('# the layer')} (Net.__call__)"}


def sources_in_scopes(fn, *args):
    """The sources of all equations of a function that is traced as for a plan."""
    with module_scopes():
        return {user_source(equation) for equation in jax.jit(fn).trace(*args).jaxpr.eqns}


def test_modules_of_nnx_are_named_by_the_line_that_calls_the_library():
    state = jnp.ones((8, 4)), jnp.ones((8, 4))
    assert sources_in_scopes(Gated(nnx.Rngs(0)), state, jnp.ones((8, 4))) == {
        f"{HERE}:{line_of('# the cell')} (Gated.__call__)"
    }


def test_modules_of_equinox_are_named_by_the_line_that_calls_the_library():
    eqx = pytest.importorskip("equinox")

    class Whole(eqx.Module):
        part: eqx.nn.Linear  # pyright: ignore[reportInvalidTypeForm]

        def __call__(self, x):
            return self.part(x)  # the part

    whole = Whole(eqx.nn.Linear(4, 4, key=jax.random.key(0)))
    (source,) = sources_in_scopes(lambda x: whole(x), jnp.ones(4))
    assert source.startswith(f"{HERE}:{line_of('# the part')} (")


@pytest.mark.parametrize("folder", ["costmodel", "diffshard_models", "search_spaces_of_mine"])
def test_neighbours_of_packages_are_code_of_the_user(folder):
    package = Path(replay.__file__).resolve().parents[1] / folder / "net.py"
    names = {}
    exec(compile("def call(x):\n    return x + 1\n", str(package), "exec"), names)
    (equation,) = jax.make_jaxpr(names["call"])(1.0).eqns
    assert user_source(equation) == f"{package}:2 (call)"


def test_every_note_of_a_plan_has_a_source():
    args = jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((4, 4))), jnp.ones((4, 4))
    spec = PartitionSpec("data")
    plan = diffshard.search(step, MESH, hardware="h100", solver="exact", in_shardings=(None, spec)).plan(*args)
    for end in ("# the loop", "# the branch"):
        assert any(f"{HERE}:{line_of(end)} (step" in note for note in plan.notes), plan.notes
    experts = diffshard.baselines.baseline_plans(step, MESH, *args, hardware="h100", solver="exact")
    for one in (plan, *experts.values()):
        assert one.notes
        assert all(f"{HERE}:" in note for note in one.notes), one.notes


def test_functions_are_found_below_their_wrappers():
    defined = f"{HERE}:{line_of('def step(params, x):')} (step)"
    assert function_source(step) == function_source(functools.partial(step, None)) == function_source(jax.jit(step))
    assert function_source(step) == defined
    assert function_source(len) == "len"
