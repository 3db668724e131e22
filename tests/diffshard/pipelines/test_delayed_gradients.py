"""`delayed(step)` is the step with gradients of the weights of one step ago: on one device and in stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from diffshard.pipelines.execution import _Dispatch
from diffshard.pipelines.plans.consistency import from_json, to_json
from diffshard.pipelines.stage_function import StageFunction
from tests.diffshard.pipelines import scanned_models
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_pipelined_function import leave

KEY = jax.random.key(1)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))
NUM_STEPS = 4


def mlp():
    keys = jax.random.split(KEY, 4)
    return {f"w{i}": jax.random.normal(keys[i], (8, 8)) / 2 for i in range(4)} | {"temperature": jnp.float32(1.5)}


def mlp_loss(params, batch):
    x, y = batch
    for i in range(4):
        x = jnp.tanh(x @ params[f"w{i}"])
    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))  # has no batch, yet its gradient is delayed
    return jnp.mean((x * params["temperature"] - y) ** 2) + 1e-2 * penalty


def batches(shape=(8, 8)):
    keys = jax.random.split(KEY, NUM_STEPS)
    return [(jax.random.normal(key, shape), jax.random.uniform(key, shape)) for key in keys]


def step_of(loss_fn, optimizer):
    def train_step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, optax.tree.norm(params))

    return train_step


def by_hand(loss_fn, optimizer, params, batches, predicted_steps=0.0):
    """Trains with gradients of the weights of one step ago, or predicted ones, as the definition says."""
    older, previous, opt_state, losses, norms = params, params, optimizer.init(params), [], []
    for batch in batches:
        read = jax.tree.map(lambda p, o: p + predicted_steps * (p - o), previous, older)
        loss, gradients = jax.value_and_grad(loss_fn)(read, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        norms.append(optax.tree.norm(params))
        older, previous, params = previous, params, optax.apply_updates(params, updates)
        losses.append(loss)
    return params, previous, opt_state, losses, norms


@pytest.mark.parametrize(
    ("optimizer", "num_microbatches", "predicted_steps"),
    [(optax.sgd(0.3), 1, 0.0), (ADAMW, 4, 0.0), (optax.sgd(0.1, momentum=0.9), 1, 1.0), (ADAMW, 4, 0.5)],
    ids=["sgd", "adamw", "momentum, predicted", "adamw, predicted by half a step"],
)
def test_gradients_and_the_loss_are_of_the_previous_or_predicted_weights_and_all_else_of_the_current_ones(
    optimizer, num_microbatches, predicted_steps
):
    params = mlp()
    late = diffshard.pipelines.delayed(jax.jit(step_of(mlp_loss, optimizer)), predicted_steps=predicted_steps)
    step = jax.jit(diffshard.pipelines.in_microbatches(late, num_microbatches))
    state, losses, norms = (params, optimizer.init(params)), [], []
    for batch in batches():
        state, (loss, norm) = step(state, batch)
        losses.append(loss)
        norms.append(norm)
    expected = by_hand(mlp_loss, optimizer, params, batches(), predicted_steps)
    found, opt_state = diffshard.pipelines.current_version(state)
    previous = {name: array.previous for name, array in state[0].items()}  # type: ignore[attr-defined]
    check_close((found, previous, opt_state, losses, norms), expected)
    exact = by_hand(mlp_loss, optimizer, params, batches()[:1])[0]
    check_close(diffshard.pipelines.current_version(step((params, optimizer.init(params)), batches()[0])[0])[0], exact)


def test_a_prediction_by_one_step_is_that_of_the_velocity_with_momentum():
    rate, momentum = 0.1, 0.9
    optimizer = optax.sgd(rate, momentum)
    step = diffshard.pipelines.delayed(step_of(mlp_loss, optimizer), predicted_steps=1)
    state = mlp(), optimizer.init(mlp())
    params, previous = mlp(), mlp()
    velocity = last_velocity = jax.tree.map(jnp.zeros_like, mlp())
    for batch in batches():
        # SpecTrain: w - rate * velocity, with the velocity that made w
        read = jax.tree.map(lambda w, v: w - rate * v, previous, last_velocity)
        gradients, last_velocity = jax.grad(mlp_loss)(read, batch), velocity
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradients)
        previous, params = params, jax.tree.map(lambda w, v: w - rate * v, params, velocity)
        state, _ = step(state, batch)
    check_close(diffshard.pipelines.current_version(state)[0], params)


def test_a_training_goes_on_with_and_without_prediction_from_the_state_of_the_other():
    plain, predicting = (
        diffshard.pipelines.delayed(step_of(mlp_loss, ADAMW), predicted_steps=steps) for steps in (0, 1)
    )
    state, _ = plain((mlp(), ADAMW.init(mlp())), batches()[0])
    state, _ = predicting(state, batches()[1])
    check_close([x.older for x in versions_of(state)], jax.tree.leaves(mlp()))
    state, _ = plain(state, batches()[2])
    assert all(x.older is None for x in versions_of(state))


def test_one_compilation_serves_all_steps_after_the_first_and_both_versions_can_be_donated():
    step = diffshard.pipelines.delayed(step_of(mlp_loss, ADAMW))
    (state, _), _ = step.with_versions((mlp(), ADAMW.init(mlp())), batches()[0])
    jitted = jax.jit(step, donate_argnums=0)
    for batch in batches():
        state, _ = jitted(state, batch)
    assert jitted._cache_size() == 1  # type: ignore[attr-defined]
    assert not any(isinstance(leaf, diffshard.pipelines.DelayedArray) for leaf in jax.tree.leaves(state[1]))


def test_a_gradient_that_a_loop_accumulates_is_delayed_and_random_keys_are_not():
    def train_step(state, batch):
        w, key = state

        def add(total, x):
            noise = jax.random.normal(key, x.shape)
            return total + jax.grad(lambda w: jnp.sum((x * w + noise) ** 2))(w), None

        gradient, _ = jax.lax.scan(add, jnp.zeros_like(w), batch)
        return (w - 0.01 * gradient, jax.random.split(key)[0]), jnp.sum(w)

    step, state, x = diffshard.pipelines.delayed(train_step), (jnp.float32(1.0), KEY), jnp.arange(1.0, 4.0)
    weights, key = [1.0, 1.0], KEY
    for _ in range(NUM_STEPS):
        noise = float(jax.random.normal(key, ()))
        weights.append(weights[-1] - 0.01 * sum(2 * float(v) * (float(v) * weights[-2] + noise) for v in x))
        key = jax.random.split(key)[0]
        state, total = step(state, x)
        np.testing.assert_allclose(total, weights[-2], rtol=1e-5)
    np.testing.assert_allclose(state[0].current, weights[-1], rtol=1e-5)
    assert (jax.random.key_data(state[1]) == jax.random.key_data(key)).all()


def test_steps_that_cannot_be_delayed_are_refused():
    train_step = step_of(mlp_loss, optax.sgd(0.1))
    state = mlp(), optax.sgd(0.1).init(mlp())
    with pytest.raises(ValueError, match="has no gradient of an array that it replaces"):
        diffshard.pipelines.delayed(lambda state, batch: (state * 2, batch.sum()))(jnp.ones(2), jnp.ones(3))
    with pytest.raises(
        ValueError, match=r"replaces argument 0.*temperature.* inside of what differentiates, such as a loop"
    ):
        diffshard.pipelines.delayed(lambda state, batch: jax.lax.scan(train_step, state, batch))(
            state, jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches())
        )
    with pytest.raises(TypeError, match="`fn` must be a function, not int"):
        diffshard.pipelines.delayed(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`predicted_steps` must be a finite number, 0 or more, not -1"):
        diffshard.pipelines.delayed(train_step, predicted_steps=-1)
    with pytest.raises(ValueError, match="`predicted_steps` is 1, but train_step is delayed with 0 already"):
        diffshard.pipelines.delayed(diffshard.pipelines.delayed(train_step), predicted_steps=1)


@pytest.mark.parametrize(
    ("name", "args", "predicted_steps"),
    [
        ("mlp", lambda: ((mlp(), ADAMW.init(mlp())), batches()[0]), 0.0),
        ("scanned", scanned_models.arguments, 0.0),
        ("scanned", scanned_models.arguments, 1.0),
    ],
)
def test_a_pipeline_of_two_stages_runs_with_the_results_of_one_device(name, args, predicted_steps, monkeypatch):
    train_step = step_of(mlp_loss, ADAMW) if name == "mlp" else scanned_models.train_step
    state, batch = args()
    leave(monkeypatch, 1, 2)
    pipeline = diffshard.Pipeline(
        microbatches=4, schedules=("2bw",), max_stages=2, residuals=("keep",), predicted_steps=predicted_steps
    )
    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipelined = diffshard.search(train_step, cluster, pipeline=pipeline, donate_argnums=0)
    plan = pipelined.plan(state, batch)
    assert len(plan.stages) == 2
    words = " ".join(str(plan).split())
    assert "gradients are of the weights of one step ago" in words
    assert ("predicted 1 step ahead" in words) == (predicted_steps == 1)
    assert plan.predicted_steps == predicted_steps
    assert from_json(to_json(plan), "plan.json", diffshard.PipelinePlan) == plan
    slowest_s = max(4 * (stage.forward_s + stage.backward_s) + stage.end_s for stage in plan.stages)
    assert slowest_s <= plan.step_s * (1 + 1e-9)
    check_previous_versions_are_state(next(iter(pipelined._prepared.values())).found)
    (all_versions, _), _ = pipelined._with_versions((state, batch), {})
    replaced = [place.is_replaced for place in pipelined.places(state, batch)]
    assert all(replaced[: len(jax.tree.leaves(all_versions))])
    assert len(pipelined._prepared) == 1  # no other pipeline was searched
    one_device = jax.jit(diffshard.pipelines.delayed(train_step, predicted_steps=predicted_steps))
    expected = state
    applied = plan.apply(train_step, cluster)(jax.tree.map(jnp.copy, state), batch)
    check_close(jax.tree.map(jnp.asarray, applied[1]), one_device(state, batch)[1])
    found = jax.tree.map(jnp.copy, state)  # the memory of the first state is given up
    given, freed = [], []
    run = _Dispatch.run

    def look_before_the_end(self, call, *arguments):
        if call.program.label.kind == "finish":
            freed.append([all(p.is_deleted() for p in getattr(array, "parts", [array])) for array in given])
        return run(self, call, *arguments)

    monkeypatch.setattr(_Dispatch, "run", look_before_the_end)  # the penalty of the MLP needs the oldest version there
    for _ in range(NUM_STEPS):
        oldest = [x.older if predicted_steps else x.previous for x in versions_of(found)]
        given[:] = jax.tree.leaves(oldest)
        found, result = pipelined(found, batch)
        expected, expected_result = one_device(expected, batch)
        check_close(*(jax.tree.map(jnp.asarray, tree) for tree in (result, expected_result)))
    at_ends = [is_free for is_free in freed if is_free]  # the first call gets one version
    assert at_ends
    assert name == "mlp" or all(map(all, at_ends)), "a version more is made while the oldest one is there"
    assert "1 plan>" in repr(pipelined)
    assert versions_of(found)
    check_close(jax.tree.map(jnp.asarray, found), expected)
    current = diffshard.pipelines.current_version(found)
    assert jax.tree.structure(current) == jax.tree.structure(state)


def check_previous_versions_are_state(found):
    """Checks that stages keep both versions, and are priced with storing the current one as the previous one is."""
    staged, step = found.staged, found.step
    for stage in range(staged.num_stages):
        function = StageFunction(staged, stage, 1)
        places = zip(step.call.paths, staged.inputs, staged.homes, strict=True)
        previous = [
            key for path, key, home in places if ".previous" in path and home == stage and staged.avals[key].ndim
        ]
        assert previous or stage
        assert set(previous) <= set(function.kept)
        assert {function.result_of[key] for key in previous} <= set(staged.inputs)


def versions_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, diffshard.pipelines.DelayedArray))
    return [leaf for leaf in leaves if isinstance(leaf, diffshard.pipelines.DelayedArray)]


def test_a_search_does_not_choose_between_schedules_with_different_results():
    assert "2bw" not in diffshard.Pipeline().schedules
    with pytest.raises(ValueError, match=r"must be \('2bw',\) where it has '2bw'"):
        diffshard.Pipeline(schedules=("1f1b", "2bw"))


def test_two_versions_of_weights_are_refused_where_gradients_are_not_delayed():
    def step(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(lambda w: (x @ w).mean())(weights))

    cluster = diffshard.Cluster.from_devices(jax.devices()[:2], hardware="h100")
    pipelined = diffshard.search(step, cluster, pipeline=diffshard.Pipeline(schedules=("1f1b",)))
    weights = diffshard.pipelines.DelayedArray(jnp.ones((4, 4)), jnp.ones((4, 4)))
    with pytest.raises(TypeError, match="current_version"):
        pipelined(weights, jnp.ones((8, 4)))
