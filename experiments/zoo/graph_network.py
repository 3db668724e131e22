"""A graph network of jraph with haiku's MLPs: messages along edges, sums by `segment_sum`, padded graphs."""

import haiku as hk  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import jraph  # pyright: ignore[reportMissingImports]
import numpy as np
import optax

from experiments.zoo.base import TrainingStep

WIDTH = 64


def make() -> TrainingStep:
    """Makes an encoder, two rounds of messages and a readout for each graph, on a batch of 32 random graphs."""

    def network(graphs):
        def mlp(name):
            return jraph.concatenated_args(
                hk.Sequential([hk.nets.MLP([128, WIDTH], name=name), hk.LayerNorm(-1, True, True)])
            )

        graphs = jraph.GraphMapFeatures(hk.Linear(WIDTH), hk.Linear(WIDTH), hk.Linear(WIDTH))(graphs)
        for layer in range(2):
            step = jraph.GraphNetwork(
                update_node_fn=mlp(f"nodes_{layer}"),
                update_edge_fn=mlp(f"edges_{layer}"),
                update_global_fn=mlp(f"globals_{layer}"),
            )
            new = step(graphs)
            graphs = graphs._replace(
                nodes=graphs.nodes + new.nodes, edges=graphs.edges + new.edges, globals=graphs.globals + new.globals
            )
        return hk.Linear(1)(graphs.globals)[:, 0]

    net = hk.without_apply_rng(hk.transform(network))
    optimizer = optax.adam(1e-3)

    def train_step(params, opt_state, graphs, targets):
        def loss_fn(params):
            mask = jraph.get_graph_padding_mask(graphs)
            return jnp.sum(jnp.where(mask, (net.apply(params, graphs) - targets) ** 2, 0.0)) / jnp.sum(mask)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    generator = np.random.default_rng(0)
    graphs = jraph.pad_with_graphs(jraph.batch_np([_random_graph(generator) for _ in range(31)]), 512, 2048, 32)
    targets = generator.normal(size=32).astype(np.float32)
    params = net.init(jax.random.PRNGKey(0), graphs)
    return TrainingStep(train_step, (params, optimizer.init(params)), (graphs, targets))


def _random_graph(generator: np.random.Generator):
    nodes, edges = int(generator.integers(8, 16)), int(generator.integers(20, 60))
    return jraph.GraphsTuple(
        nodes=generator.normal(size=(nodes, 16)).astype(np.float32),
        edges=generator.normal(size=(edges, 8)).astype(np.float32),
        globals=np.zeros((1, 8), np.float32),
        senders=generator.integers(0, nodes, edges),
        receivers=generator.integers(0, nodes, edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
    )
