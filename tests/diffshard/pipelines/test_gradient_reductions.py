"""Gradients that are reduced once a step: the results are the same, and micro-batches reduce nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diffshard
from cost.pipeline_schedules import graph_of
from diffshard.pipelines.cutting import cut_step, uncut_step
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments
from diffshard.pipelines.plans.consistency import from_json, to_json
from diffshard.plans.printing import format_s
from experiments.pipelines.stage_memory import compiled_program
from search_spaces.pipelines import example_groups
from search_spaces.pipelines.divided_program import with_split_backward
from search_spaces.pipelines.example_groups import in_groups
from search_spaces.pipelines.stage_labels import Label
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.replay import bind
from tests.diffshard.pipelines import scanned_models, small_pipeline
from tests.diffshard.pipelines.small_pipeline import check_close, meshes

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))


def mlp_step(params, batch):
    """Returns losses of each example too, in the order of the batch, and a number that is the same in all parts."""
    x, y = batch

    def loss_fn(params):
        losses = ((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2).mean(-1)
        return losses.mean(), (losses, params["up"].sum())

    (loss, aux), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, _ = OPTIMIZER.update(gradients, OPTIMIZER.init(params))
    return optax.apply_updates(params, updates), (loss, *aux)


def mlp_arguments(width=16, examples=64):
    keys = jax.random.split(jax.random.key(1), 4)
    up, down = (jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:2])
    return {"up": up, "down": down}, tuple(jax.random.normal(key, (examples, width)) for key in keys[2:])


def staged_parts(step, args, num_stages, num_microbatches, num_groups):
    """Returns a step in even stages, in micro-batches that are parts of groups of examples, and the cut step."""
    uncut = uncut_step(step, num_microbatches * num_groups, BatchArguments((1,), ()), args, {}, num_groups)
    candidates = uncut.candidates()
    candidates = [c for c in candidates if c.cut.trip] or candidates
    cut = cut_step(uncut, [candidates[len(candidates) * i // num_stages].cut for i in range(1, num_stages)])
    return staged_step(cut.parts, cut.cuts), cut


def grouped(step, args, num_stages, num_microbatches, num_groups):
    """Returns a step in even stages, in micro-batches of groups of examples, and the cut step."""
    staged, cut = staged_parts(step, args, num_stages, num_microbatches, num_groups)
    return in_groups(staged), cut


@pytest.mark.parametrize(
    ("step", "args", "num_stages", "num_microbatches", "num_groups", "schedule"),
    [
        (small_pipeline.train_step, small_pipeline.arguments, 2, 2, 4, "1f1b"),  # tied embedding, masks, clipping
        (scanned_models.train_step, scanned_models.arguments, 2, 4, 2, "1f1b"),  # masks inside of the scan
        (mlp_step, mlp_arguments, 1, 4, 2, "1f1b"),
        (scanned_models.train_step, scanned_models.arguments, 2, 2, 2, "zb-h1"),
    ],
)
def test_results_are_those_of_one_device(step, args, num_stages, num_microbatches, num_groups, schedule):
    args = args()
    staged, cut = grouped(step, args, num_stages, num_microbatches, num_groups)
    assert staged.num_microbatches == num_microbatches
    staged = with_split_backward(staged) if schedule == "zb-h1" else staged
    graph = graph_of(schedule, num_stages, num_microbatches)
    execution = StagedExecution(staged, meshes([2] * num_stages), graph, lambda stage, key: None)
    found = cut.result(execution(cut.flat_arguments(jax.tree.leaves(args))))
    found = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, diffshard.pipelines.StagedArray) else x, found)
    check_close(found, jax.jit(step)(*args))


def test_what_is_the_same_in_all_groups_is_not_copied_for_each():
    args = scanned_models.arguments()
    staged, _ = grouped(scanned_models.train_step, args, 2, 2, 2)
    weights = {x.shape for x in jax.tree.leaves(args[0]) if hasattr(x, "shape") and x.ndim > 1}
    layers = {(n, *shape[1:]) for shape in weights for n in range(1, scanned_models.LAYERS + 1)}
    made = {staged.avals[key].shape for p in staged.programs.values() if p.label.kind == "forward" for key in p.makes}
    assert made  # residuals and activations
    assert not any((2, *shape) in made for shape in weights | layers)


def test_an_operation_that_cannot_compute_groups_is_named(monkeypatch):
    def bind_without_tanh(equation, operands, **parameters):
        if equation.primitive.name == "tanh":
            raise NotImplementedError("no batching rule")
        return bind(equation, operands, **parameters)

    staged, _ = staged_parts(mlp_step, mlp_arguments(), 1, 4, 2)
    monkeypatch.setattr(example_groups, "bind", bind_without_tanh)
    with pytest.raises(ValueError, match=r"tanh \(.*test_gradient_reductions.py.* cannot compute groups of examples"):
        in_groups(staged)


@pytest.fixture(scope="module")
def searched():
    """The pipelines that a search finds on two slow hosts, which pay in spite of the network between them.

    Without a choice of how gradients are reduced, and with it.
    """
    hosts, between = tuple((device,) for device in jax.devices()[:2]), diffshard.Link(10e-6, 1 / 1e10)
    cluster = diffshard.Cluster([diffshard.Hosts(2, 1, "t4")], between=between, devices=(hosts,))

    def search(*ways):
        options = {"microbatches": 4, "max_stages": 1, "schedules": ("1f1b",), "residuals": ("keep",)}
        pipeline = diffshard.Pipeline(**options, gradient_reductions=ways)
        return diffshard.search(mlp_step, cluster, pipeline=pipeline)

    args = mlp_arguments(512, 4096)
    each, free = search("each_microbatch"), search("each_microbatch", "once")
    return args, each, free, each.plan(*args), free.plan(*args)


def reductions(function, args):
    """Returns the shapes of all arrays that the backward program of a micro-batch reduces over devices."""
    calls = function.execution(*args).calls
    text = compiled_program(calls, calls.calls[Label("backward", 0)]).as_text()
    return re.findall(r"= \(?(\S+?)(?:, \S+?)*\)? (?:all-reduce|reduce-scatter)(?:-start)?\(", text)


def test_micro_batches_reduce_no_gradients(searched):
    args, each, free, *_ = searched
    assert len(reductions(each, args)) == 2
    assert not reductions(free, args)


def test_a_searched_pipeline_that_reduces_once_has_the_results_of_one_device(searched):
    args, _, free, *_ = searched
    check_close(free(*args), jax.jit(mlp_step)(*args))


def test_the_faster_way_is_taken_and_the_plan_says_so(searched):
    *_, each, free = searched
    assert (each.gradient_reduction, free.gradient_reduction) == ("each_microbatch", "once")
    assert free.step_s < each.step_s
    text = "gradients reduced once a step, over 2 groups of the examples of a micro-batch"
    assert text in str(free)
    assert text in free.html()
    assert "gradients reduced in each micro-batch" in str(each)
    assert free.notes == (
        f"With gradients reduced in each micro-batch the best step takes {format_s(each.tried[0][2])} instead of "
        f"{format_s(free.tried[0][2])}, before the programs of the stages were planned one by one.",
    )
    assert from_json(to_json(free), "plan.json", diffshard.PipelinePlan) == free


@pytest.mark.parametrize("ways", [(), ("never",)])
def test_ways_that_do_not_exist_are_refused(ways):
    with pytest.raises(ValueError, match=r"`Pipeline.gradient_reductions` must be some of"):
        diffshard.Pipeline(gradient_reductions=ways)


def test_one_device_has_no_gradients_to_reduce_once():
    cluster = diffshard.Cluster([diffshard.Hosts(1, devices=1, hardware="h100")])
    pipeline = diffshard.Pipeline(microbatches=4, gradient_reductions=("once",))
    with pytest.raises(ValueError, match="gradient_reductions` must have 'each_microbatch'"):
        diffshard.search(mlp_step, cluster, pipeline=pipeline).plan(*mlp_arguments())
