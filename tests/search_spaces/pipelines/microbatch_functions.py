"""Functions of a batch whose results in micro-batches are those of the whole batch."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

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


def loops_of_examples(weights, x):
    """A loop under `vmap` that runs for each example until its own condition ends it, as a solver of equations does."""

    def of_example(example):
        start = jnp.abs(example).sum(), jnp.abs(example) + 0.1, 0, jnp.zeros(12)
        return lax.while_loop(lambda c: c[0] < 200, lambda c: (c[0] * 1.5, c[1] * 1.1, c[2] + 1, c[3] + 1), start)

    _, grown, trips, counted = jax.vmap(of_example)(x)
    return (grown @ weights["up"]).sum(0), trips, counted


def without_faulty_replicas(weights, batch):
    """Two replicas, whose gradients are tried on other data, of which the worse is left out."""

    def loss_fn(weights, batch):
        x, labels = batch
        return cross_entropy(jnp.tanh(x @ weights["up"]) @ weights["down"], labels)

    gradients_of = diffshard.robust_gradients.zeno(loss_fn, num_replicas=2, num_dropped=1, step_size=0.1)
    loss, gradients, report = gradients_of(weights, batch, (X[::2] + 1, LABELS[::2]))
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss, report.kept


def balanced_routing(weights, x):
    """Gradients of examples read means over the batch, as those of the balancing loss of a switch layer."""

    def loss_fn(weights):
        scores = jax.nn.softmax(x @ weights["up"])
        chosen = jax.nn.one_hot(scores.argmax(-1), 20)
        return jnp.sum(chosen.mean((0, 1)) * scores.mean((0, 1))) + jnp.mean(scores @ weights["down"]) ** 2

    return jax.value_and_grad(loss_fn)(weights)


def gradient_penalty(weights, x):
    """Gradients of examples read a sum that is itself made of gradients that read a mean."""

    def loss_fn(weights):
        return jnp.mean(jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2

    def penalty(weights):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss_fn)(weights)))

    return jax.value_and_grad(penalty)(weights)


def means_of_loops(weights, x):
    """Gradients of examples read means of what loops and branches make beside other results, which read more."""
    cosine, sine = jnp.cos(x), jnp.sin(x)
    first, second = lax.scan(lambda c, _: ((jnp.tanh(c[0]), jnp.sin(c[1])), None), (x, cosine), None, length=2)[0]
    third, fourth = lax.cond(weights["up"][0, 0] > 5, lambda: (first, sine), lambda: (second * first, sine + 1))

    def loss_fn(weights):
        return third.mean() * ((x @ weights["up"]) ** 2).mean() + fourth.mean()

    return jax.value_and_grad(loss_fn)(weights)


def normed_input(weights, x):
    return ((x - x.mean(0)) / x.std(0)) @ weights["up"]


def mixed_examples(weights, x):
    """Each example is mixed with another one before the first product, as mixup does: a gather of the whole batch."""

    def loss(weights):
        order, shuffled = jax.random.permutation(KEY, len(x)), jax.random.permutation(KEY, x)
        return jnp.mean(jnp.square((0.5 * x + 0.3 * x[order] + 0.2 * shuffled) @ weights["up"]))

    return jax.value_and_grad(loss)(weights)


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
    "loops of examples": (loops_of_examples, (WEIGHTS, X)),
    "without faulty replicas": (
        without_faulty_replicas,
        (WEIGHTS, (jnp.concatenate([X, 2 * X]), jnp.tile(LABELS, (2, 1)))),
    ),
    "means of groups": (lambda weights, x: jnp.sin(x.reshape(1, 8, 6, 12)).mean(1) @ weights["up"], (WEIGHTS, X)),
    "balanced routing": (balanced_routing, (WEIGHTS, X)),
    "gradient penalty": (gradient_penalty, (WEIGHTS, X)),
    "means of loops": (means_of_loops, (WEIGHTS, X)),
    "counted loop": (counted_loop, (WEIGHTS, X)),
    "mixed examples": (mixed_examples, (WEIGHTS, X)),
    "carried key": (carried_key, (WEIGHTS, X)),
    "balanced experts": (balanced_experts, (jnp.stack([jnp.eye(12)] * 3), X)),
    "flat tokens": (flat_tokens, (WEIGHTS, X)),
    "zeros in a branch": (zeros_in_a_branch, (WEIGHTS, X)),
    "branches": (branches, (WEIGHTS, X)),
    "depthwise convolution": (depthwise, (jnp.ones((3, 3, 1, 4)), jax.random.normal(KEY, (8, 5, 5, 4)))),
    "nothing of the batch": (lambda weights, x: weights["up"] * 2, (WEIGHTS, X)),
}
