"""What everyone shares who runs a jaxpr again."""

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.replay import bind, context_of, scan_again, scan_operands, while_operands


def only_equation(fn, *args):
    """The only equation of a function's jaxpr."""
    (equation,) = jax.make_jaxpr(fn)(*args).eqns
    return equation


def test_an_equation_is_bound_to_other_operands():
    one = only_equation(lambda x: jnp.sin(x), 1.0)
    np.testing.assert_allclose(bind(one, [2.0])[0], np.sin(2.0), rtol=1e-6)
    several = only_equation(lambda x: jax.lax.top_k(x, 2), jnp.arange(3.0))
    values, indices = bind(several, [jnp.array([1.0, 5.0, 3.0])])
    assert (values.tolist(), indices.tolist()) == ([5, 3], [1, 2])


def test_name_scopes_are_restored():
    with jax.named_scope("layer"):
        equation = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns[0]

    def run(x):
        with context_of(equation):
            return bind(equation, [x])

    (again,) = jax.make_jaxpr(run)(1.0).eqns
    assert str(again.source_info.name_stack) == str(equation.source_info.name_stack)


def test_operands_of_a_scan_are_told_apart_and_another_body_runs_in_the_same_direction():
    def scan(w, c, xs):
        return jax.lax.scan(lambda c, x: (c + w * x, c), c, xs, reverse=True)

    arguments = (2.0, 1.0, jnp.arange(3.0))
    equation = only_equation(scan, *arguments)
    operands = scan_operands(equation, ["w", "c", "xs"])
    assert operands == (["w"], ["c"], ["xs"])
    carry, ys = scan_again(equation, lambda c, x: (c + 2.0 * x, c), 1.0, jnp.arange(3.0))
    expected = scan(*arguments)
    np.testing.assert_allclose(carry, expected[0])
    np.testing.assert_allclose(ys, expected[1])


def test_operands_of_a_while_loop_are_told_apart():
    def loop(limit, step, c):
        return jax.lax.while_loop(lambda c: c < limit, lambda c: c + step, c)

    equation = only_equation(loop, 10.0, 1.0, 0.0)
    assert while_operands(equation, ["limit", "step", "c"]) == (["limit"], ["step"], ["c"])
