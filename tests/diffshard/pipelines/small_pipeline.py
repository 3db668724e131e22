"""A small training step with what is hard for stages: a tied embedding, random masks, clipping, a key in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost.pipeline_schedules import checked_stages_per_device, graph_of, splits_backward
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments, divided_call, traced_call
from search_spaces.pipelines.divided_program import with_split_backward
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import num_bytes, parameters_of, places, step_parts

KEY = jax.random.key(0)
LAYERS, WIDTH, WORDS = 4, 16, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def weights():
    keys = jax.random.split(KEY, 2 * LAYERS + 1)
    layers = {f"up{i}": jax.random.normal(keys[i], (WIDTH, 2 * WIDTH)) / 4 for i in range(LAYERS)}
    layers |= {f"down{i}": jax.random.normal(keys[LAYERS + i], (2 * WIDTH, WIDTH)) / 6 for i in range(LAYERS)}
    return {"embedding": jax.random.normal(keys[-1], (WORDS, WIDTH)), **layers}


def train_step(state, batch, *, remat=False):
    params, opt_state, key = state
    tokens, labels = batch

    def layer(h, up, down):
        return h + jax.nn.gelu(h @ up) @ down

    def loss_fn(params):
        h = params["embedding"][tokens]
        for i in range(LAYERS):
            h = (jax.checkpoint(layer) if remat else layer)(h, params[f"up{i}"], params[f"down{i}"])
            h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape), h, 0.0)
        logits = h @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits.max()

    (loss, largest), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, jax.random.fold_in(key, 7)), (loss, largest)


def remat_step(state, batch):
    return train_step(state, batch, remat=True)


def arguments():
    params = weights()
    tokens = jax.random.randint(KEY, (16, 6), 0, WORDS)
    return (params, OPTIMIZER.init(params), KEY), (tokens, (tokens + 1) % WORDS)


def live_bytes(jaxpr, where):
    """Returns for each forward equation how many bytes of activations later forward equations read."""
    last_read = {}
    for index, (equation, place) in enumerate(zip(jaxpr.eqns, where, strict=True)):
        if place.direction == "forward":
            last_read.update({v: index for v in equation.invars if isinstance(v, core.Var)})
    live, result = {}, {}
    for index, (equation, place) in enumerate(zip(jaxpr.eqns, where, strict=True)):
        if place.direction == "forward":
            live.update({v: num_bytes(v.aval) for v in equation.outvars if last_read.get(v, -1) > index})
            live = {v: n for v, n in live.items() if last_read[v] > index}
            result[index] = sum(live.values())
    return result


def even_cuts(parts, num_stages):
    """Cuts where the fewest bytes of activations are live, near even places."""
    jaxpr = parts.each.program.jaxpr
    live = live_bytes(jaxpr, places(jaxpr, parameters_of(parts)))
    order = list(live)
    cuts = []
    for stage in range(1, num_stages):
        around = order[len(order) * stage // num_stages - 8 : len(order) * stage // num_stages + 8]
        cuts.append(min(around, key=lambda i: live[i]) + 1)
    return cuts


def meshes(counts, order=None):
    """Returns meshes of some numbers of devices, one after the other in an order of all devices."""
    devices, found = np.array(jax.devices()), []
    devices = devices if order is None else devices[list(order)]
    for count in counts:
        found.append(Mesh(devices[:count].reshape(-1, count), ("a", "b")))
        devices = devices[count:]
    return found


def replicated(mesh, aval):
    """Returns None: the array is stored on all devices of the stage."""


def by_example(mesh, aval):
    """Returns how a stage stores activations in parts by example; all else it replicates."""
    if len(aval.shape) == 3 and aval.shape[0] % mesh.size == 0:
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return None


def small_execution(step, counts, num_microbatches, schedule, stored=replicated, order=None, **options):
    """Returns a step on meshes of some numbers of devices, of which each has as many stages as the schedule needs."""
    traced = traced_call(step, num_microbatches, BatchArguments((1,), ()), arguments(), {})
    parts = step_parts(divided_call(traced, num_microbatches, estimates_sums=True))
    num_stages = len(counts) * checked_stages_per_device(schedule, None)
    staged = staged_step(parts, even_cuts(parts, num_stages))
    staged = with_split_backward(staged) if splits_backward(schedule) else staged
    graph, groups = graph_of(schedule, num_stages, num_microbatches), meshes(counts, order)
    on = [groups[device] for device in graph.device]
    sharding_of = lambda stage, key: stored(on[stage], staged.avals[key])  # noqa: E731
    return StagedExecution(staged, on, graph, sharding_of, **options), traced.result


def check_close(found, expected):
    """Checks that two trees of results are equal up to the order of sums."""

    def check(found, expected):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            found, expected = jax.random.key_data(found), jax.random.key_data(expected)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)

    jax.tree.map(check, found, expected)
