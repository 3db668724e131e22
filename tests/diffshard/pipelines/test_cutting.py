"""A training step that is cut inside of its scans over layers gives the results of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh

from cost.pipeline_schedules import graph_of
from diffshard.pipelines.cutting import CutStep, cut_step, uncut_step
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.staged_array import StagedArray
from experiments.models import gpt
from experiments.models.model import arguments as model_arguments
from search_spaces.pipelines.residuals import Cut
from search_spaces.pipelines.stage_programs import staged_step
from tests.diffshard.pipelines.scanned_models import LAYERS, WIDTH, arguments, train_step

NUM_MICROBATCHES = 4


def uncut(step, args):
    return uncut_step(step, NUM_MICROBATCHES, BatchArguments((1,), ()), args, {})


def cuts_at(step, trips):
    """Returns cuts at trips of the first scan over layers."""
    scan = next(candidate.cut.equation for candidate in step.candidates() if candidate.cut.trip)
    return [Cut(scan, trip) for trip in trips]


def execution(cut: CutStep):
    """Runs each stage on two devices."""
    num_stages = len(cut.cuts) + 1
    devices = np.array(jax.devices())[: 2 * num_stages].reshape(num_stages, 2)
    meshes = [Mesh(of_stage, ("a",)) for of_stage in devices]
    graph = graph_of("1f1b", num_stages, NUM_MICROBATCHES)
    return StagedExecution(staged_step(cut.parts, cut.cuts), meshes, graph, lambda stage, key: None)


def check_two_steps(step, cut, args, rtol=2e-5, atol=2e-6):
    """Compares two steps, the second of which gets the result of the first, with those of one device."""
    run = execution(cut)
    found = expected = (args[0], None)
    for _ in range(2):
        found = cut.result(run(cut.flat_arguments(jax.tree.leaves((found[0], args[1])))))
        expected = jax.jit(step)(expected[0], args[1])
        jax.tree.map(partial(_check_close, rtol=rtol, atol=atol), found, expected)
    return found


def _check_close(found, expected, rtol, atol):
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("is_remat", "trips"), [(False, (2,)), (True, (1, 3))])
def test_results_are_those_of_one_device(is_remat, trips):
    step, args = partial(train_step, remat=is_remat), arguments()
    whole = uncut(step, args)
    cut = cut_step(whole, cuts_at(whole, trips))
    found = check_two_steps(step, cut, args)
    sizes = tuple(np.diff((0, *trips, LAYERS)))
    staged = [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, StagedArray)]
    assert [array.sizes for array in staged] == [sizes] * 9  # three weights with two moments each
    stages = {next(iter(part.devices())).id // 2 for part in staged[0].parts}
    assert stages == set(range(len(sizes)))  # each stage keeps its own layers


def test_products_in_short_floats_are_cut_also_between_equations():
    step, args = partial(train_step, dtype=jnp.bfloat16), arguments()
    whole = uncut(step, args)
    cuts = cuts_at(whole, (3,))
    after = next(c.cut for c in whole.candidates() if c.cut.equation > cuts[0].equation + 3)
    cut = cut_step(whole, [*cuts, after])
    primitive = whole.parts.each.program.jaxpr.eqns[after.equation].primitive
    assert cut.parts.each.program.jaxpr.eqns[cut.cuts[1]].primitive is primitive
    check_two_steps(step, cut, args, rtol=1e-2, atol=1e-3)


def test_a_flax_model_with_rematerialised_layers_is_cut():
    sizes = {"layers": 3, "width": 8, "heads": 2, "sequence": 4, "vocabulary": 16}
    optimizer = optax.adamw(1e-2, eps=1e-3)
    model = gpt.make(batch=8, stack=gpt.scanned, block=nn.remat(gpt.Block), optimizer=optimizer, **sizes)
    args = model_arguments(model)
    whole = uncut(model.step, args)
    cut = cut_step(whole, cuts_at(whole, (1,)))
    params = check_two_steps(model.step, cut, args)[0].params
    assert all(leaf.sizes == (1, 2) for leaf in jax.tree.leaves(params["layers"]))


def test_no_number_of_an_equation_stays_in_a_cut_step():
    whole = uncut(train_step, arguments())
    cut = cut_step(whole, cuts_at(whole, (2,)))
    for part in (cut.parts.before, cut.parts.each, cut.parts.after):
        text = part.program.jaxpr.pretty_print(name_stack=True)
        assert "equation#" not in text
        assert "segment#" not in text
    assert "transpose(" in cut.parts.each.program.jaxpr.pretty_print(name_stack=True)


def test_masks_that_a_scan_keeps_are_those_of_a_micro_batch():
    jaxpr = uncut(train_step, arguments()).parts.each.program.jaxpr
    stacked = [v.aval for equation in jaxpr.eqns if equation.primitive.name == "scan" for v in equation.outvars]
    assert [aval.shape for aval in stacked if aval.dtype == bool] == [(LAYERS, 4, 6, WIDTH)]


def test_between_trips_the_carry_is_sent():
    whole = uncut(train_step, arguments())
    between = [candidate for candidate in whole.candidates() if candidate.cut.trip]
    assert [candidate.cut.trip for candidate in between] == list(range(1, LAYERS))
    assert {candidate.bytes_sent for candidate in between} == {4 * 6 * WIDTH * 4}  # examples, positions, floats
    flops = np.diff([candidate.flops_before for candidate in between])
    assert flops[0] > 2 * 2 * 4 * 6 * WIDTH * 2 * WIDTH  # two products in each layer
    np.testing.assert_allclose(flops, flops[0])


def test_arrays_in_other_segments_are_divided_again():
    whole = uncut(train_step, arguments())
    cut = cut_step(whole, cuts_at(whole, (2,)))
    arrays = jax.tree.leaves(arguments())
    position = next(i for i, segments in enumerate(cut.segments.arguments) if segments is not None)
    array = arrays[position]
    arrays[position] = StagedArray([array[:1], array[1:4], array[4:]], 0)
    first = cut.segments.positions()[position]
    found = cut.flat_arguments(arrays)[first : first + 2]
    np.testing.assert_array_equal(found[0], array[:2])
    np.testing.assert_array_equal(found[1], array[2:])


def accumulating_step(state, batch):
    def loss_fn(params, tokens):
        return (params["embedding"][tokens] ** 2).mean()

    def trip(total, tokens):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(state[0], tokens)), None

    zeros = jax.tree.map(jnp.zeros_like, state[0])
    return lax.scan(trip, zeros, batch[0].reshape(4, -1, 6))[0]


def test_a_loop_that_accumulates_gradients_is_refused_by_name():
    with pytest.raises(ValueError, match=r"accumulating_step has a scan .*remove it and give `Pipeline.microbatches`"):
        uncut(accumulating_step, arguments())
