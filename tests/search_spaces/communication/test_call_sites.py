"""Call sites: functions with every kind of inner program give what they gave, and every call site is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from search_spaces.communication.base import INT8
from search_spaces.communication.call_sites import Interpreter, find_call_sites
from search_spaces.communication.collectives import run_exact
from search_spaces.communication.simulated_spmd import simulate
from search_spaces.communication.strategies import Encode
from tests.search_spaces.communication.small_communication import MESH, mesh, small_space

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


def _scan(x):
    return lax.scan(lambda c, a: (lax.psum(c * a, "model"), lax.pmean(a, "data")), x[0], x, reverse=True)


def _loop(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, lax.psum(s[1], "model") / 4 + s[0]), (0, x))[1]


def _branch(x):
    index = (lax.axis_index("data") < 5).astype(int)
    return lax.cond(index == 1, lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)]), lambda x: 2 * x, x)


def _nested(x):
    inner = jax.jit(lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True))
    return jax.checkpoint(lambda x: lax.all_gather(inner(jnp.sin(x)), "data", tiled=True))(inner(x))


@jax.custom_jvp
def _custom_rule(x):
    return lax.psum(x, "model")


_custom_rule.defjvp(lambda primals, tangents: (_custom_rule(*primals), 3 * tangents[0]))


def _exact_only(x):
    return _custom_rule(x) + lax.pmax(x, "model")


def _several(x):
    a, b = lax.psum((x, x.sum()), ("data", "model"))
    return a + b + lax.all_to_all(x.reshape(1, 4, 1), "model", 1, 2)


CASES = [
    (_scan, ["scan 8: all_reduce", "scan 8: all_reduce"], 0),
    (_loop, ["all_reduce"], 1),
    (_branch, ["collective_permute"], 0),
    (_nested, ["reduce_scatter", "reduce_scatter", "all_gather"], 0),
    (_exact_only, [], 2),
    (_several, ["all_reduce", "all_reduce", "all_to_all"], 0),
]


@pytest.mark.parametrize(("fn", "kinds", "num_notes"), CASES, ids=[case[0].__name__[1:] for case in CASES])
def test_every_program_runs_as_it_is_written(fn, kinds, num_notes):
    row = X[:1] if fn is not _scan and fn is not _nested else X
    jaxpr = jax.make_jaxpr(fn, axis_env=list(MESH.items()))(row)
    call_sites, notes = find_call_sites(jaxpr.jaxpr, MESH)
    collectives = [call_site.collective for call_site in call_sites if call_site.collective is not None]
    names = [
        f"scan {c.trips}: {op.kind}" if c.trips > 1 else op.kind for c, op in zip(call_sites, collectives, strict=True)
    ]
    assert names == kinds
    assert len(notes) == num_notes
    visited = set()

    def at_collective(p, x, key):
        visited.add(p)
        return run_exact(collectives[p], x)

    interpreter = Interpreter(
        {call_site.path: c for c, call_site in enumerate(call_sites)}, at_collective, lambda *_: []
    )

    def local(x):
        x = x + lax.axis_index("data") + 2 * lax.axis_index("model")
        return jax.tree.leaves(fn(x)), interpreter.run(jaxpr, [x], jax.random.key(0))

    specs = P(("data", "model")) if fn is not _several else P(None, ("data", "model"))
    run = jax.shard_map(local, mesh=mesh(), in_specs=P(), out_specs=specs, check_vma=False)
    written, interpreted = jax.jit(run)(row)
    assert visited == set(range(len(call_sites)))
    for a, b in zip(written, interpreted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_each_trip_rounds_with_a_key_of_its_own():
    def loss_fn(params, batch):
        _, ys = lax.scan(lambda c, _: (c, lax.psum(batch @ params["w"], "model")), 0.0, length=6)
        return jnp.std(ys, axis=0).mean()

    params, batch = {"w": X[:4]}, X
    strategies = {"forward": (Encode(INT8.stochastic),), "backward": (Encode(INT8),)}
    space = small_space(loss_fn, params, batch, {"w": P()}, P("data"), strategies=strategies)
    choice = [0] * len(space.groups)
    spread = jax.jit(lambda key: space.loss(params, batch, choice, key))
    assert float(spread(jax.random.key(0))) > 1e-3
    assert float(spread(jax.random.key(0))) != float(spread(jax.random.key(1)))


def test_the_mesh_simulated_holds_what_no_axis_splits_once():
    shapes = []

    def local(whole, rows):
        shapes.append((whole.shape, rows.shape))
        return rows @ whole, lax.all_to_all(rows, "model", 1, 0, tiled=True)

    specs = (P(), P("data"))
    whole, rows = jnp.ones((4, 3)), X
    simulated = simulate(local, MESH, specs, (P("data"), P(("data", "model"))))
    jaxpr = jax.make_jaxpr(simulated)(whole, rows)
    assert shapes == [((4, 3), (4, 4))]
    product = next(e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert sorted(v.aval.size for v in product.invars) == [12, 32]
    np.testing.assert_allclose(simulated(whole, rows)[0], rows @ whole, rtol=1e-6)
