"""The programs of stages, run one after the other in plain Python, give the results of the whole step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from jax.extend.core import jaxpr_as_fun

from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.microbatches import BatchArguments
from search_spaces.pipelines.batch_states import Split
from search_spaces.pipelines.example_groups import in_groups
from search_spaces.pipelines.recomputed_programs import recomputed_stage
from search_spaces.pipelines.replicas import replicated_step
from search_spaces.pipelines.residuals import StageResiduals
from search_spaces.pipelines.stage_labels import NUMBER, Label
from search_spaces.pipelines.stage_programs import staged_step

LAYERS, WIDTH, EXAMPLES, MICROBATCHES = 4, 6, 12, 3
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3))
TABLE = np.arange(3.0)


def weights():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = [jax.random.normal(key, (WIDTH, WIDTH)) / 2 for key in keys[1:]]
    return {"ends": jax.random.normal(keys[0], (WIDTH, WIDTH)), "layers": layers}


def hidden(params, x):
    h = x @ params["ends"]
    for w in params["layers"]:
        h = h + jnp.tanh(h @ w)
    return h


def plain_step(params, x):
    """Each weight is of one stage."""

    def loss(params):
        h = x
        for w in params["layers"]:
            h = h + jnp.tanh(h @ w)
        return (h**2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def rich_step(state, x):
    """A tied weight, a norm over all stages, moments, a key, an unread argument, and results of all kinds."""
    params, opt_state, key, unread = state

    def loss(params):
        h = hidden(params, x)
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0.0)
        losses = ((h @ params["ends"].T - x) ** 2).mean(-1)
        return losses.mean(), (losses, h.max(0), h.min(), (h > 0).sum())

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = ADAM.update(gradients, opt_state, params)
    state = optax.apply_updates(params, updates), opt_state, jax.random.fold_in(key, 1), unread
    return state, value, metrics, TABLE, 3


def remat_step(params, x):
    def loss(params):
        h = x
        for w in params["layers"]:
            h = jax.checkpoint(lambda h, w: h + jnp.tanh(h @ w))(h, w)
        return ((h @ params["ends"]) ** 2).mean()

    return jax.value_and_grad(loss)(params)


STEPS = {
    "plain": (plain_step, weights()),
    "rich": (rich_step, (weights(), ADAM.init(weights()), jax.random.key(1), jnp.ones(2))),
    "remat": (remat_step, weights()),
}
X = jax.random.normal(jax.random.key(2), (EXAMPLES, WIDTH))


def staged_of(name, num_stages, num_groups=1):
    """Returns a step of `STEPS`, and the same cut where the fewest bytes are sent, at places that are evenly apart."""
    step, state = STEPS[name]
    uncut = uncut_step(step, MICROBATCHES * num_groups, BatchArguments((1,), ()), (state, X), {}, num_groups)
    least = min(candidate.bytes_sent for candidate in uncut.candidates())
    places = [candidate.cut for candidate in uncut.candidates() if candidate.bytes_sent == least]
    cut = cut_step(uncut, [places[len(places) * i // num_stages] for i in range(1, num_stages)])
    return cut, staged_step(cut.parts, cut.cuts)


def put_together(state, parts):
    """Joins results of micro-batches; micro-batch m of M has the examples m, m + M, m + 2M and so on."""
    if isinstance(state, Split):
        assert state.run == 1
        return np.stack(parts, axis=state.dim + 1).reshape(*parts[0].shape[: state.dim], -1)
    return {"sum": sum, "max": np.maximum.reduce, "min": np.minimum.reduce, "whole": lambda x: x[-1]}[state](parts)


def run_in_order(staged, arrays, numbers_of=lambda stage: range(MICROBATCHES)):
    """Runs all micro-batches forward and then all backward, in the last stage first; returns the flat results.

    A stage reads what it has: arguments, what its own programs made, and what others made before.

    Args:
      staged: a step in programs.
      arrays: its flat arguments.
      numbers_of: the micro-batches that a stage takes.
    """
    kept = [dict(zip(staged.inputs, arrays, strict=True)) for _ in range(staged.num_stages)]
    sent, totals = {}, {}

    def run(program, number=None):
        own = {**sent, **totals, **kept[program.label.stage], NUMBER: number}
        reads = [own[(number, key)] if (number, key) in own else own[key] for key in program.reads]
        made = zip(program.makes, jax.jit(jaxpr_as_fun(program.program))(*reads), strict=True)
        into = kept[program.label.stage] if program.label.kind == "begin" else sent
        into.update({key if number is None else (number, key): array for key, array in made})

    of_kind = {kind: [p for label, p in staged.programs.items() if label.kind == kind] for kind in KINDS}
    for program in of_kind["begin"]:
        run(program)
    stage_of = lambda program: program.label.stage  # noqa: E731
    for number in range(MICROBATCHES):
        forward = sorted(of_kind["forward"], key=stage_of)
        for program in (p for p in forward if number in numbers_of(stage_of(p))):
            run(program, np.int32(number))
    for number in range(MICROBATCHES):
        backward = sorted(of_kind["backward"], key=stage_of, reverse=True)
        for program in (p for p in backward if number in numbers_of(stage_of(p))):
            run(program, np.int32(number))
    for program in of_kind["backward"]:
        for a in program.accumulations:
            parts = [np.asarray(sent.get((m, a.part), sent.get(a.part))) for m in numbers_of(stage_of(program))]
            totals[a.total] = put_together(a.state, parts)
    for program in sorted(of_kind["finish"], key=lambda program: (program.label.phase, program.label.stage)):
        run(program)
    everything = {**sent, **totals, **{key: array for own in kept for key, array in own.items()}}
    return [o.val if isinstance(o, core.Literal) else everything[o] for o in staged.outputs]


KINDS = ("begin", "forward", "backward", "finish")


def check(name, found):
    """Compares results with those of the whole step on the whole batch."""
    step, state = STEPS[name]
    for one, other in zip(found, jax.tree.leaves(jax.jit(step)(state, X)), strict=True):
        if jnp.issubdtype(jnp.result_type(other), jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def flat_arguments(name, cut):
    return cut.flat_arguments(jax.tree.leaves((STEPS[name][1], X)))


@pytest.mark.parametrize(("name", "num_stages"), [("plain", 3), ("rich", 1), ("rich", 3)])
def test_results_are_those_of_the_whole_step(name, num_stages):
    cut, staged = staged_of(name, num_stages)
    check(name, run_in_order(staged, flat_arguments(name, cut)))


def test_results_stay_where_micro_batches_are_computed_in_groups():
    cut, staged = staged_of("rich", 2, num_groups=2)
    grouped = in_groups(staged)
    assert grouped.num_microbatches == MICROBATCHES
    check("rich", run_in_order(grouped, flat_arguments("rich", cut)))


def test_results_stay_where_stages_make_residuals_again():
    cut, staged = staged_of("remat", 2)
    for stage in range(2):
        residuals = StageResiduals(staged, stage, lambda equation: 1.0)
        staged = recomputed_stage(residuals, residuals.candidates()[-1])  # the one that keeps the least
    check("remat", run_in_order(staged, flat_arguments("remat", cut)))


def test_results_stay_where_replicas_share_the_micro_batches():
    cut, staged = staged_of("rich", 2)
    joined = replicated_step([staged, staged], [2, 1])
    found = run_in_order(joined, flat_arguments("rich", cut), lambda stage: range(2) if stage < 2 else range(2, 3))
    check("rich", found)


def test_a_stage_has_its_own_weights_and_sends_one_activation_and_one_gradient():
    _, staged = staged_of("plain", 3)
    num_weights = len(jax.tree.leaves(weights()))
    home_of = dict(zip(staged.inputs, staged.homes, strict=True))
    for key, output in zip(staged.inputs[1:num_weights], staged.outputs[1:], strict=True):
        (reader,) = staged.readers[key]
        assert home_of[key] == reader
        assert staged.makers[output] == Label("finish", reader)  # where its gradient is, so that nothing is sent
    homes = list(staged.homes[1:num_weights])
    assert homes == sorted(homes)
    assert set(homes) == {0, 1, 2}
    for here, there in itertools.permutations(range(3), 2):
        for kind in ("forward", "backward"):
            reads = staged.programs[Label(kind, there)].reads
            sent = [key for key in reads if staged.makers.get(key) == Label(kind, here)]
            is_next = there - here == (1 if kind == "forward" else -1)
            assert [staged.avals[key].shape for key in sent] == [(EXAMPLES // MICROBATCHES, WIDTH)] * is_next
