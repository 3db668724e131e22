"""Functions in micro-batches give the results of the whole batch, or name the operation that needs the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import diffshard

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (8, 6, 12))
LABELS = jax.random.randint(KEY, (8, 6), 0, 5)
WEIGHTS = {"up": jax.random.normal(KEY, (12, 20)) / 3, "down": jax.random.normal(KEY, (20, 5)) / 4}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(state, batch):
    weights, opt_state = state
    x, labels = batch

    def loss_fn(weights):
        return cross_entropy(jax.nn.gelu(x @ weights["up"]) @ weights["down"], labels)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, weights)
    return (optax.apply_updates(weights, updates), opt_state), loss


def with_dropout(weights, batch):
    x, labels = batch

    def loss_fn(weights):
        hidden = jax.nn.gelu(x @ weights["up"])
        kept = jax.random.bernoulli(jax.random.key(1), 0.7, hidden.shape)
        return cross_entropy(jnp.where(kept, hidden, 0.0) @ weights["down"], labels)

    return jax.value_and_grad(loss_fn)(weights)


def remat_layers(stacked, x):
    def loss_fn(stacked):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        return (lax.scan(layer, x, stacked)[0] ** 2).mean()

    return jax.value_and_grad(loss_fn)(stacked)


def shared_layer(weight, x):
    def loss_fn(weight):
        return (lax.scan(lambda h, _: (h + jnp.tanh(h @ weight), None), x, None, length=3)[0] ** 2).sum()

    return jax.value_and_grad(loss_fn)(weight)


def tied_embedding(table, tokens):
    def loss_fn(table):
        return cross_entropy(table[tokens] @ table.T, tokens)

    return jax.value_and_grad(loss_fn)(table)


def metrics(weights, batch):
    x, labels = batch
    logits = x @ weights["up"]
    accuracy = (jnp.argmax(logits, -1) == labels).mean()
    return logits, accuracy, logits.max(), logits.min(axis=(0, 1)), jnp.any(labels == 3), jnp.sum(labels)


def numbered(weights, x):
    """Positions in the batch are those of the whole batch."""
    number = jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None]
    return (x * number) @ weights["up"], (x * number).sum()


def branches(weights, x):
    def loss_fn(weights):
        return lax.cond(weights["up"][0, 0] > 0, lambda: (x @ weights["up"]).sum(), lambda: (x**2).sum())

    return jax.value_and_grad(loss_fn)(weights)


def depthwise(kernel, image):
    def loss_fn(kernel):
        y = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )
        return (y**2).mean()

    return jax.value_and_grad(loss_fn)(kernel)


def flat_tokens(weights, x):
    """Examples and positions in one dimension, with dropout, positions and a lookup by token."""
    flat = x.reshape(-1, 12)
    noise = jax.random.uniform(jax.random.key(2), (flat.shape[0], 20))
    number = jnp.arange(flat.shape[0], dtype=x.dtype)[:, None]
    hidden = (flat @ weights["up"]) * noise + number
    return hidden.reshape(8, 6, 20).sum(axis=1), jnp.sum(hidden**2)


def zeros_in_a_branch(weights, x):
    return lax.cond(weights["up"][0, 0] > 5, lambda: x, lambda: jnp.zeros_like(x)) + 1


def whole_in_a_branch(weights, x):
    ones = jax.nn.softmax(jnp.ones((8, 6, 12)) * weights["up"][0, 0])
    return lax.cond(weights["up"][0, 0] > 5, lambda y: x, lambda y: y, ones).sum() + ones.sum()


def masked_loss(weights, batch):
    """The loss of language models: a mean over the words that a mask keeps; the batch alone says how many these are."""
    x, labels = batch

    def loss_fn(weights):
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ weights["up"]) @ weights["down"], labels)
        mask = (labels != 2) * jnp.arange(6)
        return (losses * mask).sum() / mask.sum()

    return jax.value_and_grad(loss_fn)(weights)


def metrics_beside_a_loss(weights, x):
    """The derivative of the metric would need the whole batch, but nothing reads it."""

    def loss_fn(weights):
        hidden = x @ weights["up"]
        return (hidden**2).mean(), {"largest": hidden.max()}

    return jax.value_and_grad(loss_fn, has_aux=True)(weights)


def counted_loop(weights, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] * weights["up"][0, 0])), (0, x))


def normed_input(weights, x):
    return ((x - x.mean(0)) / x.std(0)) @ weights["up"]


def carried_key(weights, x):
    """A scan carries what is the same for all examples, and it is read afterwards."""

    def layer(carry, _):
        hidden, key, count = carry
        key, used = jax.random.split(key)
        return (jnp.tanh(hidden @ STACKED[0]) + jax.random.normal(used, (12,)), key, count + 1), count * 2

    (hidden, key, count), counts = lax.scan(layer, (x, jax.random.key(0), 0), None, length=3)
    return hidden.mean() * count, jax.random.key_data(key), counts, (count + 1) * jnp.ones(3)


def balanced_experts(stacked, x):
    """Remat layers carry a sum over the batch beside the examples; the layers' shares come out of the scan."""

    def loss_fn(stacked):
        @jax.checkpoint
        def layer(carry, w):
            hidden, balance = carry
            share = jax.nn.softmax(hidden @ w).mean((0, 1))
            return (jnp.tanh(hidden @ w), balance + (share * jnp.arange(12)).sum()), share

        (hidden, balance), shares = lax.scan(layer, (x, 0.0), stacked)
        return (hidden**2).mean() + 0.1 * balance, shares

    return jax.value_and_grad(loss_fn, has_aux=True)(stacked)


STACKED = jax.random.normal(KEY, (3, 12, 12)) / 4
FUNCTIONS = {
    "training step": (train_step, ((WEIGHTS, OPTIMIZER.init(WEIGHTS)), (X, LABELS))),
    "dropout": (with_dropout, (WEIGHTS, (X, LABELS))),
    "rematerialised layers": (remat_layers, (STACKED, X)),
    "shared layer": (shared_layer, (STACKED[0], X)),
    "tied embedding": (tied_embedding, (STACKED[0], LABELS)),
    "metrics": (metrics, (WEIGHTS, (X, LABELS))),
    "positions": (numbered, (WEIGHTS, X)),
    "masked loss": (masked_loss, (WEIGHTS, (X, LABELS))),
    "input with batch statistics": (normed_input, (WEIGHTS, X)),
    "metrics beside a loss": (metrics_beside_a_loss, (WEIGHTS, X)),
    "counted loop": (counted_loop, (WEIGHTS, X)),
    "carried key": (carried_key, (WEIGHTS, X)),
    "balanced experts": (balanced_experts, (jnp.stack([jnp.eye(12)] * 3), X)),
    "flat tokens": (flat_tokens, (WEIGHTS, X)),
    "zeros in a branch": (zeros_in_a_branch, (WEIGHTS, X)),
    "branches": (branches, (WEIGHTS, X)),
    "depthwise convolution": (depthwise, (jnp.ones((3, 3, 1, 4)), jax.random.normal(KEY, (8, 5, 5, 4)))),
    "nothing of the batch": (lambda weights, x: weights["up"] * 2, (WEIGHTS, X)),
}


@pytest.mark.parametrize("num_microbatches", [2, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_whole_batch(name, num_microbatches):
    fn, args = FUNCTIONS[name]
    results = jax.jit(diffshard.in_microbatches(fn, num_microbatches))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))


def test_activations_take_the_memory_of_a_microbatch():
    x = jnp.ones((64, 128, 64))
    args = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 8))}, (x, jnp.zeros((64, 128), int))

    def temporary_bytes(fn):
        analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole, parts = temporary_bytes(with_dropout), temporary_bytes(diffshard.in_microbatches(with_dropout, 8))
    assert parts < whole / 4, "an eighth of the activations, and the sums of the gradients"


def test_sums_of_short_floats_are_kept_in_float32():
    """In bfloat16 the 4,096 ones of 64 micro-batches would add up to 256, where one more makes no difference."""

    def fn(weight, x):
        return (x * weight).sum(axis=0)

    x = jnp.ones((4096, 8), jnp.bfloat16)
    total = jax.jit(diffshard.in_microbatches(fn, 4096))(jnp.bfloat16(1), x)
    assert total.dtype == jnp.bfloat16
    assert (total == 4096).all()


def test_a_function_in_microbatches_is_searched_and_runs_on_a_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fn, args = FUNCTIONS["training step"]
    step = diffshard.search(diffshard.in_microbatches(fn, 2), mesh, hardware="h100")
    plan = step.plan(*args)
    results = step(*plan.shard(*args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))
    assert any(operation.count == 2 for operation in plan.operations), "operations of a micro-batch run twice"


def test_what_prints_does_so_where_its_values_are_known(capfd):
    def fn(weights, x):
        loss = (x @ weights["up"]).sum()
        jax.debug.print("the loss is {}", loss)
        return loss

    loss = jax.jit(diffshard.in_microbatches(fn, 4))(WEIGHTS, X)
    jax.effects_barrier()
    assert capfd.readouterr().out == f"the loss is {loss}\n"


def test_arguments_by_keyword_are_those_by_position():
    fn, (weights, batch) = FUNCTIONS["dropout"]
    expected = jax.jit(fn)(weights, batch)
    by_position = diffshard.in_microbatches(fn, 4)
    by_name = diffshard.in_microbatches(fn, 4, batch_argnums=(), batch_argnames="batch")
    for results in (by_position(weights, batch=batch), by_name(weights, batch=batch), by_name(weights, batch)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, expected)


def in_a_loop(operation):
    """A function that applies an operation to a sum over the batch inside a loop, where sums stay in parts."""

    def fn(weights, x):
        return lax.scan(lambda total, _: (total + operation(x), None), jnp.zeros_like(operation(x)), None, length=2)[0]

    return fn


LINEAR = {
    "float16 from float32": (lambda x: (1000 * x.sum(0)).astype(jnp.float16), False),
    "bfloat16 from float32": (lambda x: x.sum(0).astype(jnp.bfloat16), True),
    "integers from floats": (lambda x: (3 * x.sum(0)).astype(jnp.int32), False),
    "short integers": (lambda x: (x > 0).astype(jnp.int32).sum(0).astype(jnp.int8), False),
    "long integers": (lambda x: (x > 0).astype(jnp.int8).sum(0, dtype=jnp.int16).astype(jnp.int32), True),
    "truth values": (lambda x: (x > 0).astype(jnp.int32).sum(0).astype(bool), False),
    "integer division": (lambda x: (x > 0).astype(jnp.int32).sum(0) // 3, False),
    "division": (lambda x: x.sum(0) / 3, True),
    "a gather that fills": (lambda x: x.sum(0).at[jnp.array([0, 99])].get(mode="fill", fill_value=1.0), False),
    "a gather that clips": (lambda x: x.sum(0).at[jnp.array([0, 99])].get(mode="clip"), True),
    "less precision": (lambda x: lax.reduce_precision(x.sum(0), 8, 4), False),
    "a choice": (lambda x: jnp.where(jnp.arange(12) > 5, x.sum(0), 7.0), True),
    "a padded sum": (lambda x: jnp.pad(x.sum(0), ((0, 0), (1, 1)), constant_values=2.0), True),
    "a power": (lambda x: x.sum(0) ** 2, False),
    "an update": (lambda x: lax.dynamic_update_slice(jnp.ones((6, 20)), x.sum(0), (0, 3)), True),
    "a product of sums": (lambda x: x.sum(0) @ x.sum(0).T, False),
    "a product": (lambda x: x.sum(0) @ jnp.ones((12, 3)), True),
    "a largest one": (lambda x: x.max(0) + 1, False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_inside_loops_what_is_linear_gives_the_whole_sum_and_all_else_is_refused(name):
    operation, is_linear = LINEAR[name]
    fn = in_a_loop(operation)
    if not is_linear:
        with pytest.raises(ValueError, match=r"needs a result of the whole batch|a part of a sum"):
            diffshard.in_microbatches(fn, 4)(WEIGHTS, X)
        return
    actual, expected = diffshard.in_microbatches(fn, 4)(WEIGHTS, X), fn(WEIGHTS, X)
    assert actual.dtype == expected.dtype
    tolerance = 2e-2 if actual.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=tolerance, atol=tolerance)


def batch_norm(weights, x):
    hidden = x @ weights["up"]
    return (hidden - hidden.mean(0)).sum()


def contrastive(weights, x):
    hidden = x[:, 0] @ weights["up"]
    return jax.nn.log_softmax(hidden @ hidden.T).sum()


def scan_over_batch(weights, x):
    return lax.scan(lambda total, row: (jnp.tanh(total + row), None), jnp.zeros(x.shape[1:]), x)[0]


def norm_in_a_loop(weights, x):
    def layer(h, _):
        return h - h.mean(0), None

    return lax.scan(layer, x, None, length=2)[0].sum()


def stops_by_the_batch(weights, x):
    return lax.while_loop(lambda h: jnp.any(h < 9), lambda h: h + 1, x)


def stops_by_a_mean(weights, x):
    return lax.while_loop(lambda h: h.mean() < 9, lambda h: h + 1, x)


@pytest.mark.parametrize(
    ("fn", "operation", "reason"),
    [
        (batch_norm, "sub", "needs a result of the whole batch before"),
        (contrastive, "dot_general", "mixes the examples"),
        (scan_over_batch, "scan", "goes through the batch"),
        (norm_in_a_loop, "sub", "needs a result of the whole batch before"),
        (lambda weights, x: jnp.sort(x, axis=0), "sort", "mixes the examples"),
        (lambda weights, x: jnp.cumsum(x, axis=0), "cumsum", "mixes the examples"),
        (lambda weights, x: jnp.sin(x.reshape(4, 2, 6, 12)).mean(1) @ weights["up"], "reshape", "mixes the examples"),
        (whole_in_a_branch, "cond", "in some branch only"),
        (stops_by_a_mean, "lt", "is inside a loop"),
        (stops_by_the_batch, "while", "stops by the batch"),
    ],
)
def test_what_needs_the_whole_batch_is_named(fn, operation, reason):
    with pytest.raises(ValueError, match=f"`num_microbatches` must be 1.*{operation} .*test_microbatches.py.*{reason}"):
        jax.eval_shape(diffshard.in_microbatches(fn, 2), WEIGHTS, X)


def test_one_part_is_the_function_itself():
    assert diffshard.in_microbatches(batch_norm, 1) is batch_norm


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`num_microbatches` must be a whole number, 1 or more, not 0"):
        diffshard.in_microbatches(train_step, 0)
    with pytest.raises(ValueError, match="`batch_argnums` must be positions of arguments, 0 or more, not -1"):
        diffshard.in_microbatches(train_step, 2, batch_argnums=-1)
    with pytest.raises(ValueError, match=r"must divide the batch; got 3 and x of shape \(8, 6, 12\)"):
        diffshard.in_microbatches(numbered, 3)(WEIGHTS, X)
    with pytest.raises(ValueError, match="names the argument 2, which the function was not given"):
        diffshard.in_microbatches(numbered, 2, batch_argnums=(1, 2))(WEIGHTS, X)
    with pytest.raises(ValueError, match="must name arguments with arrays that have a leading dimension"):
        diffshard.in_microbatches(lambda x, key: x, 2)(X, KEY)
