"""A step of gradient descent on a residual MLP whose activations take far more memory than its weights."""

import jax


def mlp_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = h + jax.nn.gelu(h @ w["up"]) @ w["down"]
        return (h * h).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def mlp_arguments(layers=4, width=32):
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    params = [
        {"up": jax.random.normal(a, (width, 2 * width)) / 6, "down": jax.random.normal(b, (2 * width, width)) / 8}
        for a, b in zip(keys[:layers], keys[layers:], strict=True)
    ]
    return params, jax.random.normal(keys[0], (512, width))
