"""Steps of many kinds that are divided between the trips of their scans give the results of the whole step."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import diffshard
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.staged_array import StagedArray
from search_spaces.pipelines.residuals import Cut
from search_spaces.pipelines.stage_programs import staged_step

KEY = jax.random.key(0)
LAYERS, WIDTH, WORDS = 5, 8, 12
TOKENS = jax.random.randint(KEY, (8, 6), 0, WORDS)
ADAM = optax.adam(1e-2, eps=1e-3)


def weights(**others):
    keys = jax.random.split(KEY, 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / 3
    down = jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / 4
    return {"embedding": jax.random.normal(keys[2], (WORDS, WIDTH)), "layers": {"up": up, "down": down}, **others}


def layer(h, w):
    return h + jnp.tanh(h @ w["up"]) @ w["down"], None


def output(h, params):
    return jax.nn.log_softmax(h @ params["embedding"].T)[..., 0].mean()


def scanned(params, tokens, unroll=1):
    h, _ = lax.scan(layer, params["embedding"][tokens], params["layers"], unroll=unroll)
    return output(h, params)


def with_layers_along_dimension_1(params, tokens):
    h, _ = lax.scan(layer, params["embedding"][tokens], jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params["layers"]))
    return output(h, params)


def with_weight_decay(params, tokens):
    return scanned(params, tokens) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params["layers"]))


def with_shared_weight(params, tokens):
    def shared(h, w):
        return layer(h @ params["shared"], w)

    return output(lax.scan(shared, params["embedding"][tokens], params["layers"])[0], params)


def encoder_and_decoder(params, tokens):
    encoded, _ = lax.scan(layer, params["embedding"][tokens], params["layers"])

    def decoder_layer(h, w):
        return layer(h + encoded.mean(1, keepdims=True), w)

    return output(lax.scan(decoder_layer, params["embedding"][tokens], params["decoder"])[0], params)


def with_all_layers_at_once(params, tokens):
    up = params["layers"]["up"].reshape(LAYERS * WIDTH, -1)
    return scanned(params, tokens) + 1e-3 * jnp.linalg.svd(up, compute_uv=False).sum()


def training_step(loss, optimizer=ADAM):
    def step(state, tokens):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def student_and_teacher_step(state, tokens):
    params, teacher, opt_state = state

    def loss(params):
        h = lax.scan(layer, params["embedding"][tokens], params["layers"])[0]
        taught = lax.scan(layer, teacher["embedding"][tokens], teacher["layers"])[0]
        return ((h - lax.stop_gradient(taught)) ** 2).mean() + output(h, params)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (params, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, params), opt_state), value


def uncut(step, args):
    return uncut_step(step, 4, BatchArguments((1,), ()), args, {})


def trips_of(whole):
    """Returns the scans over layers."""
    return sorted({candidate.cut.equation for candidate in whole.candidates() if candidate.cut.trip})


def check_divided(step, args, trips):
    """Compares a step that is divided at some trips with the whole one; returns the cut step and its result."""
    whole = uncut(step, args)
    cut = cut_step(whole, [Cut(scan, trip) for scan, trip in zip(trips_of(whole), trips, strict=True)])
    found = cut.result(jax.jit(cut.function)(*cut.flat_arguments(jax.tree.leaves(args))))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, jax.jit(step)(*args))
    return cut, found


def num_staged(tree):
    return sum(isinstance(leaf, StagedArray) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("loss", "optimizer", "expected_staged"),
    [
        (partial(scanned, unroll=2), ADAM, 6),
        (partial(scanned, unroll=LAYERS), optax.lamb(1e-2), 6),
        (scanned, optax.flatten(ADAM), 2),  # moments of all parameters in one array stay whole
        (with_weight_decay, optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), 2),
        (with_all_layers_at_once, ADAM, 5),  # the weight that the loss reads whole stays whole
    ],
)
def test_what_goes_over_the_layers_is_divided(loss, optimizer, expected_staged):
    params = weights()
    _, found = check_divided(training_step(loss, optimizer), ((params, optimizer.init(params)), TOKENS), [2])
    assert num_staged(found) == expected_staged


def test_layers_may_be_any_dimension():
    params = weights()
    params["layers"] = jax.tree.map(lambda w: jnp.moveaxis(w, 0, 1), params["layers"])
    step = training_step(with_layers_along_dimension_1)
    _, found = check_divided(step, ((params, ADAM.init(params)), TOKENS), [3])
    staged = [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, StagedArray)]
    assert [(array.dim, array.sizes) for array in staged] == [(1, (3, 2))] * 6


def test_two_scans_are_divided_each_at_its_trips():
    params = weights(decoder=jax.tree.map(jnp.negative, weights()["layers"]))
    cut, found = check_divided(training_step(encoder_and_decoder), ((params, ADAM.init(params)), TOKENS), [2, 3])
    updated = found[0][0]
    assert [updated["layers"]["up"].sizes, updated["decoder"]["up"].sizes] == [(2, 3), (3, 2)]
    assert all(cut.parts.each.program.jaxpr.eqns[i].primitive.name == "scan" for i in cut.cuts)


def test_scans_over_layers_that_belong_together_are_divided_alike():
    args = (weights(), weights(), ADAM.init(weights())), TOKENS
    cut, found = check_divided(student_and_teacher_step, args, [1, 3])
    assert {leaf.sizes for leaf in jax.tree.leaves(found) if isinstance(leaf, StagedArray)} == {(1, 2, 2)}
    replaced = {n for n in cut.call.feedback if n is not None}
    assert replaced == set(range(len(cut.call.arrays) - 1))  # all but the batch


def with_loss_of_each_layer(params, tokens):
    def balanced(h, w):
        h, _ = layer(h, w)
        return h, (h**2).mean()

    h, losses = lax.scan(balanced, params["embedding"][tokens], params["layers"])
    return output(h, params) + 0.1 * losses.sum()


@pytest.mark.parametrize("loss", [with_shared_weight, with_loss_of_each_layer])
def test_stages_send_activations_and_their_gradients_alone(loss):
    """Stages add up their own parts of the gradient of a shared weight; losses of layers are sums of each stage's."""
    params = weights(shared=jnp.eye(WIDTH))
    args = (params, ADAM.init(params)), TOKENS
    cut, _ = check_divided(training_step(loss), args, [2])
    staged = staged_step(cut.parts, cut.cuts)
    for direction, stage in (("forward", 1), ("backward", 0)):
        (reads,) = (p.reads for label, p in staged.programs.items() if label == (direction, stage, 0))
        sent = [key for key in reads if staged.makers.get(key) == (direction, 1 - stage, 0)]
        assert [staged.avals[key].shape for key in sent] == [(2, 6, WIDTH)]


def checkpoint_of_all_layers(params, tokens):
    def stack(h, layers):
        return lax.scan(layer, h, layers)[0]

    return output(jax.checkpoint(stack)(params["embedding"][tokens], params["layers"]), params)


def indexed_layers(params, tokens):
    def body(i, h):
        return layer(h, jax.tree.map(lambda w: w[i], params["layers"]))[0]

    return output(lax.fori_loop(0, LAYERS, body, params["embedding"][tokens]), params)


@pytest.mark.parametrize("loss", [checkpoint_of_all_layers, indexed_layers])
def test_loops_that_cannot_be_divided_have_no_cuts(loss):
    params = weights()
    assert trips_of(uncut(training_step(loss), ((params, ADAM.init(params)), TOKENS))) == []


def test_a_checkpoint_of_all_layers_is_named_where_they_stay_in_one_stage():
    args = (weights(), ADAM.init(weights())), TOKENS
    cluster = diffshard.Cluster([diffshard.Hosts(2, devices=1, hardware="v100")])
    options = {"pipeline": diffshard.Pipeline(microbatches=2), "donate_argnums": 0}
    named = r"stay in one stage, because a jax.checkpoint \(.*test_scan_segments.py.*Put it around the function of one"
    plan = diffshard.search(training_step(checkpoint_of_all_layers), cluster, **options).plan(*args)
    assert re.search(named, " ".join(plan.notes))
    with pytest.raises(diffshard.InfeasibleError, match=named):
        diffshard.search(training_step(checkpoint_of_all_layers), cluster, memory_limit_bytes=9e3, **options).plan(
            *args
        )


def test_a_state_in_the_place_of_the_batch_is_refused():
    def momentum_step(weights, momentum, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        momentum = 0.9 * momentum + gradient
        return weights - 0.1 * momentum, momentum, loss

    arguments = jnp.ones((4, 4)), jnp.zeros((4, 4)), jnp.ones((8, 4))
    cluster = diffshard.Cluster([diffshard.Hosts(2, devices=1, hardware="v100")])
    with pytest.raises(
        ValueError, match=r"`Pipeline\.batch_argnums` must name .* as of momentum, and adds no gradients"
    ):
        diffshard.search(momentum_step, cluster, pipeline=diffshard.Pipeline(microbatches=2)).plan(*arguments)
    pipeline = diffshard.Pipeline(batch_argnums=2, microbatches=2)
    assert diffshard.search(momentum_step, cluster, pipeline=pipeline).plan(*arguments).num_microbatches == 2
