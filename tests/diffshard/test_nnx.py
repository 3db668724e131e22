"""Functions that change nnx modules in place: as `nnx.jit`, and with what the mesh's devices hold split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import diffshard
from tests.diffshard.sharding_search.small_searches import SLOW, assert_equal, mesh_2x2


class Classifier(nnx.Module):
    """A small network with everything that changes in training: parameters, statistics, random numbers."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(16, 64, use_bias=False, rngs=rngs)  # a norm takes a bias away again
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def train_step(model, optimizer, x, *, scale=1.0):
    def loss_of(model):
        return (model(x) ** 2).mean() * scale

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def objects():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def search(fn, **options):
    return diffshard.nnx.search(fn, mesh_2x2(), hardware=SLOW, **options)


def numbers_of(modules):
    """Returns the arrays of modules, random keys as numbers."""
    leaves = jax.tree.leaves(nnx.state(modules))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


X = jnp.linspace(-1.0, 1.0, 32 * 16).reshape(32, 16)


@pytest.fixture(scope="module")
def trained():
    """What three steps of `nnx.jit` make."""
    model, optimizer = objects()
    run = nnx.jit(train_step)
    losses = [run(model, optimizer, X, scale=2.0) for _ in range(3)]
    return numbers_of((model, optimizer)), losses


def test_modules_train_as_under_nnx_jit_and_stay_split(trained):
    model, optimizer = objects()
    step = search(train_step, donate_argnums=(0, 1))
    plan = step.plan(model, optimizer, X, scale=2.0)
    step.shard(model, optimizer, X, scale=2.0)
    losses = [step(model, optimizer, X, scale=2.0) for _ in range(3)]
    assert_equal((numbers_of((model, optimizer)), losses), trained)
    specs = {tensor.path: tensor.partition_spec for tensor in plan.arguments}
    wanted = NamedSharding(mesh_2x2(), specs["model['inner']['kernel'].value"])
    assert not wanted.is_fully_replicated
    assert model.inner.kernel[...].sharding.is_equivalent_to(wanted, 2)


def test_a_saved_plan_is_applied_to_a_function_of_modules(trained, tmp_path):
    abstract = nnx.eval_shape(objects)
    plan = search(train_step).plan(*abstract, X, scale=2.0)
    plan.save(tmp_path / "plan.json")
    step = diffshard.nnx.apply(diffshard.Plan.load(tmp_path / "plan.json", mesh_2x2()), train_step)
    model, optimizer = objects()
    losses = [step(model, optimizer, x=X, scale=2.0) for _ in range(3)]
    assert_equal((numbers_of((model, optimizer)), losses), trained)


def test_a_result_may_be_a_module_that_is_an_argument():
    def step(model, x):
        model.norm.mean[...] += 1
        return model, {"sum": model(x).sum()}

    model, _ = objects()
    same, _ = search(step)(model, X)
    assert same is model
    assert float(model.norm.mean[0]) > 0.9
    one, other = (nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2))
    results = search(lambda one, other, x: (other, one(x), one))(one, other, jnp.ones((4, 8)))
    assert results[0] is other
    assert results[2] is one


def test_static_arguments_stay_static():
    def step(layer, x, power, name):
        for _ in range(power):
            x = layer(x)
        return x if name == "plain" else -x

    layer, x = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    run = search(step, static_argnums=3, static_argnames="power")
    twice = x @ layer.kernel[...] @ layer.kernel[...]
    np.testing.assert_allclose(run(layer, x, 2, "plain"), twice, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(layer, x, power=2, name="other"), -twice, rtol=1e-5, atol=1e-6)


def test_arrays_of_donated_modules_are_given_up():
    def step(layer, other, x):
        layer.kernel[...] -= 0.1 * x.T @ layer(x)
        return other(x)

    layer, other = (nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(seed)) for seed in range(2))
    run = search(step, donate_argnums=0)
    run.shard(layer, other, jnp.ones((4, 8)))
    before = layer.kernel[...], other.kernel[...]
    run(layer, other, jnp.ones((4, 8)))
    assert [array.is_deleted() for array in before] == [True, False]
    assert not layer.kernel[...].is_deleted()


def test_shared_variables_stay_shared():
    def step(pair):
        pair["a"].kernel[...] += 1
        return pair["b"].kernel[...].sum()

    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = np.asarray(layer.kernel[...])
    result = search(step)({"a": layer, "b": layer})
    np.testing.assert_allclose(result, (before + 1).sum(), rtol=1e-5)
    np.testing.assert_allclose(layer.kernel[...], before + 1, rtol=1e-6)


def test_a_change_of_structure_is_refused():
    def step(model, x):
        model.more = nnx.Param(jnp.ones(8))
        return model(x)

    with pytest.raises(ValueError, match=r"step changes the structure .* adds `model\.more`.*`nnx\.pop`"):
        search(step)(objects()[0], X)

    def without_bias(layer):
        layer.bias = None
        return layer.kernel[...].sum()

    with pytest.raises(ValueError, match=r"removes `layer\.bias`"):
        search(without_bias)(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))


class Standardised(nnx.Module):
    """A network with what micro-batches can compute: statistics of the batch itself, and random numbers of layers."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, use_bias=False, use_scale=False, rngs=rngs)
        self.inner = nnx.Linear(16, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.largest = nnx.BatchStat(jnp.zeros(64))
        self.outer = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):  # noqa: D102
        hidden = self.dropout(nnx.relu(self.inner(self.norm(x))))
        self.largest[...] = jnp.maximum(self.largest[...], jax.lax.stop_gradient(hidden).max(0))
        return self.outer(hidden)


def standardised():
    model = Standardised(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


@pytest.mark.parametrize("run_of", [search, nnx.jit, lambda step: step], ids=["search", "nnx.jit", "plain"])
def test_modules_train_in_microbatches_as_with_the_whole_batch(run_of):
    expected = standardised()
    expected_losses = [nnx.jit(train_step)(*expected, X, scale=2.0) for _ in range(2)]
    modules = standardised()
    run = run_of(diffshard.pipelines.in_microbatches(train_step, 4, batch_argnums=2))
    losses = [run(*modules, X, scale=2.0) for _ in range(2)]
    assert_equal((numbers_of(modules), losses), (numbers_of(expected), expected_losses))


def test_modules_train_in_microbatches_as_with_gradients_that_are_added_by_hand():
    def loss_of(layer, x):
        return (layer(x) ** 2).mean()

    def step(layer, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(layer, x)
        optimizer.update(layer, gradients)
        return layer, loss

    def made():
        layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return layer, nnx.Optimizer(layer, optax.adam(0.1), wrt=nnx.Param)

    expected, optimizer = made()
    parts = [nnx.value_and_grad(loss_of)(expected, X[i::4]) for i in range(4)]
    optimizer.update(expected, jax.tree.map(lambda *gradients: sum(gradients) / 4, *(grads for _, grads in parts)))
    modules = made()
    same, loss = search(diffshard.pipelines.in_microbatches(step, 4, batch_argnums=2))(*modules, X)
    assert same is modules[0]
    assert_equal((numbers_of(same), loss), (numbers_of(expected), sum(loss for loss, _ in parts) / 4))


def test_microbatches_of_modules_are_refused_where_examples_are_mixed_or_the_structure_changes():
    with pytest.raises(ValueError, match=r"`num_microbatches` must be 1 for train_step: .*as batch normalisation does"):
        diffshard.pipelines.in_microbatches(train_step, 4, batch_argnums=2)(*objects(), X)

    def step(model, x):
        model.more = nnx.Param(jnp.ones(8))
        return model(x)

    with pytest.raises(ValueError, match=r"step changes the structure .* adds `model\.more`"):
        diffshard.pipelines.in_microbatches(step, 4)(standardised()[0], X)


def test_a_budget_refuses_changes_in_place_and_takes_modules_that_are_returned():
    phases = [diffshard.elastic.Phase(mesh=mesh_2x2().abstract_mesh, num_steps=n, hardware=SLOW) for n in (1, 2)]
    model, optimizer = standardised()
    for step in (train_step, diffshard.pipelines.in_microbatches(train_step, 4, batch_argnums=2)):
        with pytest.raises(ValueError, match=r"`fn` of `budget` must return.* changes `model` and `optimizer`"):
            diffshard.elastic.budget(step, phases, model, optimizer, X)
    returned = diffshard.pipelines.in_microbatches(lambda *args: (train_step(*args), *args[:2]), 4, batch_argnums=2)
    plan = diffshard.elastic.budget(returned, phases, model, optimizer, X).plans[0]
    assert {tensor.path for tensor in plan.outputs} > {"result[1].inner.kernel.value", "result[2].step.value"}


def test_microbatches_say_that_changes_of_a_dictionary_are_lost():
    def step(state, x):
        state["sum"] = state["sum"] + x.sum()
        return (x @ state["weight"]).sum()

    with pytest.warns(UserWarning, match="step changes `state` in place, and these changes are lost"):
        diffshard.pipelines.in_microbatches(step, 4)({"sum": jnp.zeros(()), "weight": jnp.ones((16, 8))}, X)


def test_the_plain_search_says_that_changes_in_place_are_lost():
    model, optimizer = objects()
    with pytest.warns(UserWarning, match=r"train_step changes `model`.* in place, and .* lost.*diffshard\.nnx\.search"):
        diffshard.search(train_step, mesh_2x2(), hardware=SLOW).plan(model, optimizer, X)
    eval_model = nnx.eval_shape(objects)[0]
    eval_model.eval()
    diffshard.search(lambda model, x: model(x), mesh_2x2(), hardware=SLOW).plan(eval_model, X)
    assert jax.tree.leaves(eval_model)


def test_wrong_uses_are_refused_by_name():
    model, optimizer = objects()
    with pytest.raises(TypeError, match="`fn` must be a function, not int"):
        diffshard.nnx.search(3, mesh_2x2())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"`plan` must be a Plan.*not str"):
        diffshard.nnx.apply("plan.json", train_step)  # pyright: ignore[reportArgumentType]
    step = search(train_step)
    with pytest.raises(TypeError, match="train_step does not take these arguments: missing a required argument: 'x'"):
        step.plan(model, optimizer)
    plan = step.plan(model, optimizer, X)
    with pytest.raises(diffshard.PlanError, match=r"diffshard\.nnx\.apply"):
        plan.apply(train_step)
    with pytest.raises(diffshard.PlanError, match=r"step\.shard"):
        plan.shard(model)
