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


STACKED = jax.random.normal(KEY, (3, 12, 12)) / 4
FUNCTIONS = {
    "training step": (train_step, ((WEIGHTS, OPTIMIZER.init(WEIGHTS)), (X, LABELS))),
    "dropout": (with_dropout, (WEIGHTS, (X, LABELS))),
    "rematerialised layers": (remat_layers, (STACKED, X)),
    "shared layer": (shared_layer, (STACKED[0], X)),
    "tied embedding": (tied_embedding, (STACKED[0], LABELS)),
    "metrics": (metrics, (WEIGHTS, (X, LABELS))),
    "positions": (numbered, (WEIGHTS, X)),
    "flat tokens": (flat_tokens, (WEIGHTS, X)),
    "zeros in a branch": (zeros_in_a_branch, (WEIGHTS, X)),
    "branches": (branches, (WEIGHTS, X)),
    "depthwise convolution": (depthwise, (jnp.ones((3, 3, 1, 4)), jax.random.normal(KEY, (8, 5, 5, 4)))),
    "nothing of the batch": (lambda weights, x: weights["up"] * 2, (WEIGHTS, X)),
}


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_whole_batch(name, num_microbatches):
    fn, args = FUNCTIONS[name]
    results = jax.jit(diffshard.in_microbatches(fn, num_microbatches))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), results, jax.jit(fn)(*args))


def test_activations_take_the_memory_of_a_microbatch():
    x = jnp.ones((64, 128, 64))
    args = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 8))}, (x, jnp.zeros((64, 128), int))

    def temporary_bytes(fn):
        return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes

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


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`num_microbatches` must be a whole number, 1 or more, not 0"):
        diffshard.in_microbatches(train_step, 0)
    with pytest.raises(ValueError, match="`batch_argnums` must be positions of arguments, 0 or more, not -1"):
        diffshard.in_microbatches(train_step, 2, batch_argnums=-1)
    with pytest.raises(ValueError, match=r"must divide the batch; got 3 and argument 1 of shape \(8, 6, 12\)"):
        diffshard.in_microbatches(numbered, 3)(WEIGHTS, X)
    with pytest.raises(ValueError, match="names argument 2, and the function was given 2"):
        diffshard.in_microbatches(numbered, 2, batch_argnums=(1, 2))(WEIGHTS, X)
    with pytest.raises(ValueError, match="must name arguments with arrays that have a leading dimension"):
        diffshard.in_microbatches(lambda x, key: x, 2)(X, KEY)
