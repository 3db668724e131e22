"""Searching, planning and running: state that comes back as it goes in, given shardings, limits, types of arguments."""

import contextlib
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import diffshard
from diffshard.base import Proposal
from search_spaces.sharding import space
from tests.diffshard.sharding_search.small_searches import (
    SLOW,
    assert_equal,
    mesh_2x2,
    train_arguments,
    train_step,
    weights,
)

H100 = diffshard.preset("h100", {"data": 4, "model": 8})


def test_state_comes_back_as_it_goes_in_and_is_searched_once():
    state, batch = train_arguments()
    traces = []

    def counted(state, batch):
        traces.append(1)
        return train_step(state, batch)

    step = diffshard.search(counted, mesh_2x2(), hardware=SLOW, donate_argnums=0)
    plan = step.plan(state, batch)
    expected, _ = train_arguments()
    state, batch = plan.shard(state, batch)
    loss = expected_loss = None
    for _ in range(3):
        state, loss = step(state, batch)
        expected, expected_loss = train_step(expected, batch)
    assert_equal((state, loss), (expected, expected_loss))
    assert len(traces) == 1
    for leaf, tensor in zip(jax.tree.leaves(state), plan.arguments, strict=False):
        assert leaf.sharding.is_equivalent_to(NamedSharding(plan.placed_mesh, tensor.partition_spec), leaf.ndim)


def test_other_shapes_are_searched_again_and_a_search_that_nobody_asked_for_is_told():
    step = diffshard.search(lambda x: x @ x.T, mesh_2x2(), hardware=SLOW)
    assert_equal(step(weights(16, 4)), weights(16, 4) @ weights(16, 4).T)
    with pytest.warns(UserWarning, match=r"`x` is float32\[8, 4\], not float32\[16, 4\].*partial batch"):
        assert_equal(step(weights(8, 4)), weights(8, 4) @ weights(8, 4).T)
    for n in (16, 8):  # the suite makes errors of warnings
        assert_equal(step(weights(n, 4)), weights(n, 4) @ weights(n, 4).T)
    assert step.plan(weights(8, 4)).arguments[0].shape == (8, 4)


def mix(shares, batch):
    shares = (shares * batch).mean(axis=0)
    return shares, shares.sum()


def test_a_search_that_only_a_weak_type_asks_for_is_told():
    step = diffshard.search(mix, mesh_2x2(), hardware=SLOW)
    shares, _ = step(jnp.full(4, 0.25), weights(16, 4))
    with pytest.warns(UserWarning, match=r"`shares` is float32\[4\], not float32\[4\] of a weak type.*Python numbers"):
        step(shares, weights(16, 4))
    step = diffshard.search(mix, mesh_2x2(), hardware=SLOW)
    shares, _ = step(jnp.full(4, 0.25, jnp.float32), weights(16, 4))
    step(shares, weights(16, 4))  # the suite makes errors of warnings


def test_a_plan_that_does_not_fit_because_of_a_weak_type_says_so():
    step = diffshard.search(mix, mesh_2x2(), hardware=SLOW)
    weak, strong = jnp.full(4, 0.25), jnp.full(4, 0.25, jnp.float32)
    for made_for, given in [(weak, strong), (strong, weak)]:
        with pytest.raises(diffshard.PlanError, match=r"only drops a weak type.*jnp\.float32"):
            step.plan(made_for, weights(16, 4)).apply(mix).plan(given, weights(16, 4))


def test_given_shardings_are_kept():
    state, batch = train_arguments()
    specs = (({"a": PartitionSpec(None, "y"), "b": None}, None), PartitionSpec("x"))
    plan = diffshard.search(train_step, mesh_2x2(), hardware=SLOW, in_shardings=specs).plan(state, batch)
    found = {t.path: t for t in plan.arguments}
    assert found["state[0]['a']"].spec == ((), ("y",))
    assert found["state[0]['a']"].given
    assert found["batch"].spec == (("x",), ())
    assert not found["state[0]['b']"].given
    carried = jax.device_put(batch, NamedSharding(mesh_2x2(), PartitionSpec(None, "x")))
    plan = diffshard.search(train_step, mesh_2x2(), hardware=SLOW).plan(state, carried)
    assert {t.path: t for t in plan.arguments}["batch"].spec == ((), ("x",))


def test_static_arguments():
    step = diffshard.search(lambda n, x: x**n, mesh_2x2(), hardware=SLOW, static_argnums=0)
    x = weights(8, 4)
    assert_equal(step(3, x), x**3)
    assert_equal(step(2, x), x**2)


def test_mesh_of_one_device_is_allowed():
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    state, batch = train_arguments()
    step = diffshard.search(train_step, mesh, hardware=SLOW)
    assert step.plan(state, batch).collectives == ()
    assert_equal(step(state, batch), train_step(state, batch))


def test_memory_limit_shards_the_state():
    state, batch = train_arguments()
    free = diffshard.search(train_step, mesh_2x2(), hardware=SLOW, donate_argnums=0).plan(state, batch)
    with pytest.raises(diffshard.InfeasibleError, match="at least"):
        diffshard.search(train_step, mesh_2x2(), hardware=SLOW, memory_limit_bytes=100.0).plan(state, batch)
    limit = 0.84 * free.peak_bytes  # of all limits below the free plan's peak one of the fastest to prove optimal
    tight = diffshard.search(train_step, mesh_2x2(), hardware=SLOW, memory_limit_bytes=limit, donate_argnums=0)
    plan = tight.plan(state, batch)
    assert plan.peak_bytes <= limit
    assert plan.step_s >= free.step_s * (1 - 1e-6)


def test_the_time_limit_begins_when_the_problem_is_built(monkeypatch):
    late_s, limits = [0.0], []
    real, clock = space.transfer_matrices, time.perf_counter

    def slow_matrices(*args):
        late_s[0] += 1000.0
        return real(*args)

    def recorder(problem, *, time_limit_s, key):
        limits.append(time_limit_s)
        yield Proposal(np.zeros(len(problem.node_cost), np.int64))

    monkeypatch.setattr(space, "transfer_matrices", slow_matrices)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late_s[0])  # one clock for all modules
    diffshard.search(train_step, mesh_2x2(), hardware=SLOW, solver=recorder, time_limit_s=900.0).plan(
        *train_arguments()
    )
    assert limits[0] > 90.0  # the first stage has a fifth of the limit; none of it went into building


def test_interrupted_search_returns_the_best_so_far():
    def interrupted(problem, *, time_limit_s, key):
        yield Proposal(np.zeros(len(problem.node_cost), np.int64))
        raise KeyboardInterrupt

    state, batch = train_arguments()
    step = diffshard.search(train_step, mesh_2x2(), hardware=SLOW, solver=interrupted)
    plan = step.plan(state, batch)
    assert plan.status == "interrupted"
    assert "interrupted" in str(plan)
    assert_equal(step(state, batch), train_step(state, batch))


def test_reason_of_a_choice_is_what_the_next_best_costs():
    state, batch = train_arguments()
    plan = diffshard.search(train_step, mesh_2x2(), hardware=SLOW).plan(state, batch)
    products = [o for o in plan.operations if o.signature.startswith("dot_general")]
    assert len(products) == 5  # two forward, three backward
    assert all(o.next_best_spec not in (None, o.value_specs[0]) and o.next_best_s > 0 for o in products)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_meshes_of_any_axis_type_in_and_out_of_their_context(types, in_context, placed):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (types,) * 2, devices=jax.devices()[:4])
    w, x = np.asarray(weights(8, 8)), np.asarray(weights(16, 8))
    step = diffshard.search(lambda w, x: jnp.tanh(x @ w).sum(axis=1), mesh, hardware=SLOW)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        a, b = (jax.device_put(v, NamedSharding(mesh, PartitionSpec("x"))) if placed else v for v in (w, x))
        found = step(a, b)
        step.lower(a, b)
    np.testing.assert_allclose(np.asarray(found), np.tanh(x @ w).sum(axis=1), rtol=1e-5)


def test_a_searched_step_can_be_transformed():
    def fn(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    w, x = weights(8, 8), weights(16, 8)
    step = diffshard.search(fn, mesh_2x2(), hardware=SLOW)
    assert_equal(jax.jit(step)(w, x), fn(w, x))
    assert_equal(jax.grad(step)(w, x), jax.grad(fn)(w, x))
    assert_equal(jax.vmap(step, (None, 0))(w, x[None]), fn(w, x)[None])


def test_axes_of_one_device_may_be_named():
    mesh = jax.make_mesh((1, 4), ("one", "x"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = NamedSharding(mesh, PartitionSpec(("x", "one")))
    x = weights(16, 8)
    step = diffshard.search(
        lambda x: jax.lax.with_sharding_constraint(x * 2, spec) @ weights(8, 8),
        mesh,
        hardware=SLOW,
        in_shardings=(PartitionSpec(("one", "x")),),
    )
    assert step.plan(x).arguments[0].spec == (("x",), ())
    assert_equal(step(x), x * 2 @ weights(8, 8))


def test_weak_types_and_types_of_static_values_are_told_apart():
    x = weights(8, 4).astype(jnp.bfloat16)
    step = diffshard.search(lambda s, x: s * x, mesh_2x2(), hardware=SLOW)
    assert step(2.0, x).dtype == jnp.bfloat16
    assert step(jnp.float32(2), x).dtype == jnp.float32
    static = diffshard.search(lambda n, x: n * x, mesh_2x2(), hardware=SLOW, static_argnums=0)
    assert static(1, jnp.arange(8)).dtype == jnp.int32
    assert static(1.0, jnp.arange(8)).dtype == jnp.float32


def test_numpy_float64_is_what_jax_makes_of_it():
    step = diffshard.search(lambda x: x * 2, mesh_2x2(), hardware=SLOW)
    x = np.ones((8, 4))
    plan = step.plan(x)
    assert_equal(step(plan.shard(x)), jnp.full((8, 4), 2.0))


def test_what_a_lookup_and_an_update_touch_is_what_they_move():
    table, ids = jax.ShapeDtypeStruct((2**20, 64), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)
    mesh = AbstractMesh((1,), ("x",))
    lookup = diffshard.search(lambda t, i: t[i], mesh, hardware="h100").plan(table, ids)
    assert lookup.compute_s < 1.1e-6  # a kernel's launch takes a microsecond, the whole table 100
    row = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    write = diffshard.search(
        lambda t, r: jax.lax.dynamic_update_slice(t, r, (5, 0)), mesh, hardware="h100", donate_argnums=0
    ).plan(table, row)
    assert write.compute_s < 1.1e-6
    assert write.peak_bytes < 1.01 * 2**20 * 64 * 4


def test_the_tie_break_does_not_inflate_the_gap():
    mesh = AbstractMesh((16, 16), ("x", "y"))
    table, ids = jax.ShapeDtypeStruct((2**20, 1024), jnp.float32), jax.ShapeDtypeStruct((256, 128), jnp.int32)
    plan = diffshard.search(lambda t, i: t[i].sum(axis=1), mesh, hardware="h100").plan(table, ids)
    assert 0 <= plan.gap < 0.02


def test_plans_are_saved_loaded_and_applied(tmp_path):
    state, batch = train_arguments()
    mesh = mesh_2x2()
    plan = diffshard.search(train_step, mesh, hardware=SLOW).plan(state, batch)
    plan.save(tmp_path / "plan.json")
    loaded = diffshard.Plan.load(tmp_path / "plan.json", mesh)
    assert loaded == plan
    assert_equal(loaded.apply(train_step)(*loaded.shard(state, batch)), train_step(state, batch))
    with pytest.raises(diffshard.PlanError, match="does not fit the function: at operation"):
        loaded.apply(lambda s, b: (s, b.sum()))(state, batch)
    with pytest.raises(diffshard.PlanError, match=r"does not fit the function: it was made for .* results"):
        loaded.apply(lambda s, b: (*train_step(s, b), b))(state, batch)
    with pytest.raises(diffshard.PlanError, match=r"batch.*\[16, 8\].*\[4, 8\]"):
        loaded.shard(state, batch[:4])


def test_a_plan_is_refused_on_a_mesh_whose_axes_are_in_another_order(tmp_path):
    state, batch = train_arguments()
    mesh = mesh_2x2()
    turned = Mesh(mesh.devices, mesh.axis_names[::-1])
    plan = diffshard.search(train_step, mesh, hardware=SLOW).plan(state, batch)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(diffshard.PlanError, match="`mesh` has the axes"):
        plan.apply(train_step, turned)
    with pytest.raises(diffshard.PlanError, match="`mesh` has the axes"):
        diffshard.Plan.load(tmp_path / "plan.json", turned)


def test_a_batch_is_split_over_hosts_however_small_it_is():
    mesh = AbstractMesh((4, 8), ("data", "model"))
    params = {"up": weights(128, 512), "down": weights(512, 128)}
    batch = weights(32, 128), weights(32, 128), jnp.ones(3), jax.random.key(0)

    def step(params, batch):
        x, target, extra, key = batch

        def loss_of(params):
            predicted = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
            return jnp.mean((predicted - target) ** 2) * extra.sum() * jax.random.uniform(key)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_of)(params))

    def specs(hardware, given=None):
        plan = diffshard.search(step, mesh, hardware=hardware, in_shardings=given).plan(params, batch)
        return [t.spec for t in plan.arguments if "batch" in t.path]

    whole = [((), ()), ((), ()), ((),), ()]
    assert specs(H100) == [(("data",), ()), (("data",), ()), ((),), ()]  # 4 hosts do not divide the third
    one_host = {name: dataclasses.replace(link, num_hosts=1) for name, link in H100.links.items()}
    assert specs(dataclasses.replace(H100, links=one_host)) == whole  # half a microsecond faster
    assert specs(H100, given=(None, PartitionSpec())) == whole
