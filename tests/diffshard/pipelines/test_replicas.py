"""Replicas of a pipeline that take unequal numbers of micro-batches give the results of one device."""

import jax
import numpy as np
import pytest

import diffshard
from cost.base import Hardware, Link
from cost.pipeline_schedules import graph_of
from cost.pipeline_times import joined_graph
from diffshard.pipelines.cutting import uncut_step
from diffshard.pipelines.execution import StagedExecution
from diffshard.pipelines.microbatches import BatchArguments, divided_call, traced_call
from diffshard.pipelines.options import PipelineOptions
from diffshard.pipelines.plans.consistency import from_json, to_json
from diffshard.pipelines.replica_search import replicas_bound_s
from diffshard.pipelines.step_search import StepSearch
from search_spaces.pipelines.replicas import replica_part, replicated_step
from search_spaces.pipelines.stage_programs import staged_step
from search_spaces.pipelines.step_parts import step_parts
from tests.diffshard.pipelines import scanned_models
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, even_cuts, meshes, train_step
from tests.diffshard.pipelines.test_execution import Gate
from tests.diffshard.pipelines.test_pipelined_function import leave

PIPELINE = diffshard.Pipeline(microbatches=8, schedules=("1f1b",), max_stages=2, max_replicas=2, residuals=("keep",))


def step_with_pieces(state, batch):
    """Has sums, a maximum, and a result in the order of the batch."""
    state, told = train_step(state, batch)
    return state, (*told, batch[0] * 2)


def unequal_cluster():
    fast, slow = (
        Hardware(name, flops, np.inf, 1e9, {}, kernel_launch_s=0.0) for name, flops in (("fast", 1e9), ("slow", 1.2e9))
    )
    hosts, devices = [diffshard.Hosts(1, 4, fast), diffshard.Hosts(1, 2, slow)], jax.devices()
    link = Link(1e-9, 1e-13)
    return diffshard.Cluster(hosts, link, link, ((tuple(devices[:4]),), (tuple(devices[4:6]),)))


@pytest.fixture(scope="module")
def staged():
    traced = traced_call(step_with_pieces, 8, BatchArguments((1,), ()), arguments(), {})
    parts = step_parts(divided_call(traced, 8, estimates_sums=True))
    return staged_step(parts, even_cuts(parts, 2)), traced.result


def test_two_replicas_of_two_stages_on_unequal_submeshes_give_the_results_of_one_device(staged):
    step, result = staged
    joined, on = replicated_step([step, step], [5, 3]), meshes((2, 2, 1, 1))
    graph = joined_graph([graph_of("1f1b", 2, 5), graph_of("1f1b", 2, 3)])
    execution = StagedExecution(joined, on, graph, lambda stage, key: None)
    flat = [jax.device_put(array, execution.place(i)) for i, array in enumerate(jax.tree.leaves(arguments()))]
    gate, tokens = Gate(), len(flat) - 2
    first = execution(flat)
    execution.wait()  # all is compiled
    expected, told = jax.jit(step_with_pieces)(*arguments())
    check_close(result.unflatten(first), (expected, told))
    held_up = gate.held_up(flat[tokens], execution.place(tokens))
    second = execution([*jax.tree.leaves(result.unflatten(first)[0]), held_up, flat[-1]])
    assert not second[0].is_ready()
    gate.opened.set()
    execution.wait()
    assert not gate.was_late  # the step was dispatched before its first program could run
    assert execution.copied.blocked == 0
    check_close(result.unflatten(second), jax.jit(step_with_pieces)(expected, arguments()[1]))


def test_a_replica_reads_no_state_of_the_optimiser(staged):
    step, _ = staged
    part = replica_part(step)
    assert not any(label.kind == "finish" for label in part.programs)
    read = {key for program in part.programs.values() for key in program.reads}
    of_step = {key for program in step.programs.values() for key in program.reads}
    params, moments = (len(jax.tree.leaves(tree)) for tree in arguments()[0][:2])
    inputs = [key for key in step.inputs if key in of_step]
    assert [key in read for key in inputs[:params]] == [True] * params
    assert not any(key in read for key in inputs[params : params + moments])


def test_micro_batches_that_are_not_all_taken_are_refused(staged):
    with pytest.raises(ValueError, match=r"`microbatches` must be 2 numbers, 1 or more, and together 8, not \(5, 4\)"):
        replicated_step([staged[0], staged[0]], (5, 4))


def test_the_search_finds_replicas_whose_results_are_those_of_one_device(monkeypatch):
    leave(monkeypatch, 2, 2)  # stages of two of the fast devices
    step, args = scanned_models.train_step, scanned_models.arguments()
    pipelined = diffshard.search(step, unequal_cluster(), pipeline=PIPELINE)
    plan = pipelined.plan(*args)
    assert [len(stage.devices) for stage in plan.all_stages] == [2, 2, 1, 1]
    assert plan.main_microbatches == 8 - plan.replicas[0].num_microbatches > 4
    assert 0 < plan.lower_bound_s <= plan.step_s
    assert from_json(to_json(plan), "plan.json", diffshard.PipelinePlan) == plan
    assert "2 replicas of 2 stages on 6 devices" in str(plan)
    assert f"Replica 1: {plan.replicas[0].num_microbatches} micro-batches of 8" in str(plan)
    assert "Replica 1" in plan.html()
    assert not any(stage.arguments for stage in plan.replicas[0].stages)
    expected = jax.jit(step)(*args)
    found = pipelined(*args)
    check_close(found, expected)
    check_close(plan.apply(step, unequal_cluster())(*args), expected)


def test_no_division_of_layers_among_kinds_is_below_the_bound():
    cluster, args = unequal_cluster(), arguments()
    options = PipelineOptions(fn=train_step, cluster=cluster, pipeline=PIPELINE)
    search = StepSearch(options, uncut_step(train_step, 8, PIPELINE.batch, args, {}), [False] * 30)
    bound_s = replicas_bound_s(search)
    fast, slow = (
        min(8 * search.least_layer_s(p)[0].sum() * s.num_devices for p, s in enumerate(search.submeshes) if s.kind == k)
        for k in range(2)
    )
    shares = np.linspace(0, 1, 201)
    best = np.maximum(shares * fast / 4, (1 - shares) * slow / 2).min()
    assert 0.5 * best < bound_s <= best * 1.001
