"""`steps` with the schedule "2bw" keeps a pipeline filled: each step begins before the one before it has ended."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

import diffshard
from cost.pipeline_schedules import BACKWARD, FORWARD
from cost.pipeline_steps import overlapped_operations
from diffshard.pipelines.execution import _Dispatch
from diffshard.pipelines.plans.consistency import simulated
from diffshard.pipelines.plans.text import format_s
from search_spaces.pipelines.stage_labels import Label
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_delayed_gradients import KEY, mlp, mlp_loss, step_of
from tests.diffshard.pipelines.test_execution import Gate
from tests.diffshard.pipelines.test_pipelined_function import leave

NUM_STEPS, NUM_STAGES, COUNT = 12, 3, 4


def sgd(state, batch):
    loss, gradients = jax.value_and_grad(mlp_loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.3 * g, state, gradients), loss


def clipped(state, batch):
    return step_of(mlp_loss, CLIPPED)(state, batch)[0], jnp.float32(0.0)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-2))
BATCHES = [
    (jax.random.normal(key, (8, 8)), jax.random.uniform(key, (8, 8))) for key in jax.random.split(KEY, NUM_STEPS)
]


def pipelined(step, monkeypatch, **options):
    leave(monkeypatch, 1, NUM_STAGES)
    pipeline = diffshard.Pipeline(microbatches=COUNT, schedules=("2bw",), max_stages=NUM_STAGES)
    cluster = diffshard.Cluster.from_devices(jax.devices()[:NUM_STAGES], hardware="h100")
    return diffshard.search(step, cluster, pipeline=pipeline, **options)


def started_programs(monkeypatch):
    """Returns a list to which each program that is started is added: its label, and its micro-batch or None."""
    started, run = [], _Dispatch.run

    def watched(self, call, microbatch, *arguments):
        started.append((call.program.label, microbatch))
        return run(self, call, microbatch, *arguments)

    monkeypatch.setattr(_Dispatch, "run", watched)
    return started


def seconds_of_a_step(started, plan):
    """Runs programs on devices that begin each when the one started before it has ended and what it reads is there."""
    stages, seen, free, links = plan.stages, Counter(), Counter(), Counter()
    arrived, ends = {}, {}
    for label, m in started:
        step, stage = seen[label, m], label.stage
        seen[label, m] += 1
        if label.kind in ("forward", "backward"):
            is_forward = label.kind == "forward"
            seconds = stages[stage].forward_s if is_forward else stages[stage].backward_s
            start = max(free[stage], arrived.get((label, step, m), 0.0))
            free[stage] = start + seconds
            target, sender = (stage + 1, stages[stage]) if is_forward else (stage - 1, stages[stage - 1])
            send_s = sender.send_forward_s if is_forward else sender.send_backward_s
            if 0 <= target < len(stages):
                links[stage, target] = max(links[stage, target], free[stage]) + send_s
                arrived[Label(label.kind, target), step, m] = links[stage, target]
        elif label.kind == "finish" and (stage, step) not in ends:
            free[stage] += stages[stage].end_s
            ends[stage, step] = free[stage]
    middle, last = NUM_STEPS // 3, NUM_STEPS - 2
    return max((ends[stage, last] - ends[stage, middle]) / (last - middle) for stage in range(len(stages)))


@pytest.mark.parametrize(
    ("step", "state", "overlap"),
    [(sgd, mlp, "own_ends"), (clipped, lambda: (mlp(), CLIPPED.init(mlp())), "late_ends")],
)
def test_devices_run_steps_in_the_predicted_seconds_with_the_results_of_one_device(step, state, overlap, monkeypatch):
    on_stages = pipelined(step, monkeypatch, donate_argnums=0)
    started = started_programs(monkeypatch)
    plan = on_stages.plan(state(), BATCHES[0])
    assert plan.overlap == overlap
    assert len(plan.stages) >= 2
    one_device, expected = jax.jit(diffshard.pipelines.delayed(step)), state()
    for batch, found in zip(BATCHES, on_stages.steps(state(), iter(BATCHES)), strict=True):
        expected = one_device(expected[0] if batch is not BATCHES[0] else expected, batch)
        check_close(jax.tree.map(jnp.asarray, found), expected)  # though the next step has begun, its memory is there
    assert seconds_of_a_step(started, plan) == pytest.approx(plan.step_s, rel=0.02)
    started.clear()
    found, _ = on_stages(state(), BATCHES[0])
    for batch in BATCHES[1:]:
        found, _ = on_stages(found, batch)
    call_s = simulated(plan).call_s
    assert seconds_of_a_step(started, plan) == pytest.approx(call_s, rel=0.02)
    assert call_s > 1.1 * plan.step_s
    assert f"calls one by one take {format_s(call_s)} each" in " ".join(str(plan).split())
    check_nothing_waits(on_stages, found)


def check_nothing_waits(on_stages, state):
    """Checks that steps are started while the first program of the first one cannot run yet."""
    gate, x = Gate(), BATCHES[0][0]
    idle = jax.make_mesh((2,), ("x",), devices=jax.devices()[6:8])  # programs of one CPU device may run at once
    held_up = gate.held_up(x, jax.sharding.NamedSharding(idle, jax.sharding.PartitionSpec()))
    batch = held_up, BATCHES[0][1]
    last = [state for state, _ in on_stages.steps(state, [batch] * 2)][-1]  # JAX starts no more than 32 programs
    weights = last if isinstance(last, dict) else last[0]
    assert not any(array.current.is_ready() for array in weights.values())
    gate.opened.set()
    assert on_stages.execution(last, batch).copied.blocked == 0
    jax.block_until_ready(last)
    assert not gate.was_late


def test_a_step_whose_micro_batches_read_what_an_end_makes_does_not_overlap(monkeypatch):
    def step(state, batch):
        (weights, key), (x, y) = state, batch
        x += jax.random.normal(key, x.shape)
        loss, gradients = jax.value_and_grad(mlp_loss)(weights, (x, y))
        key = jax.random.fold_in(key, (10 * loss).astype(int))
        return (jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradients), key), loss

    on_stages, state = pipelined(step, monkeypatch), (mlp(), KEY)
    plan = on_stages.plan(state, BATCHES[0])
    assert plan.overlap == "none"
    assert plan.step_s == pytest.approx(simulated(plan).call_s)
    assert "overlap   none" in str(plan)
    one_device, expected = jax.jit(diffshard.pipelines.delayed(step)), state
    for batch, found in zip(BATCHES[:3], on_stages.steps(state, BATCHES[:3]), strict=True):
        expected, loss = one_device(expected, batch)
        check_close(found, (expected, loss))


def test_what_is_no_iterable_of_equal_batches_is_refused(monkeypatch):
    on_stages = pipelined(sgd, monkeypatch)
    with pytest.raises(TypeError, match=r"Argument 1 of `steps` must be an iterable of batches.* not .* ArrayImpl"):
        on_stages.steps(mlp(), BATCHES[0][0])
    with pytest.raises(TypeError, match=r"Argument 1 of `steps` must be an iterable of batches.* not .* dict"):
        on_stages.steps(mlp(), {"x": BATCHES[0][0]})
    with pytest.raises(ValueError, match=r"was not given the argument that has the batch \(1, by"):
        on_stages.steps(mlp())
    short = jax.tree.map(lambda x: x[:4], BATCHES[1])
    with pytest.raises(ValueError, match=r"Argument 1 .*equal shapes and types; that of step 2 has"):
        list(on_stages.steps(mlp(), [BATCHES[0], short]))
    assert list(on_stages.steps(mlp(), [])) == []


@pytest.mark.parametrize(("num_stages", "count"), [(1, 1), (3, 1), (3, 2), (3, 4), (5, 8)])
def test_operations_of_steps_that_overlap_are_those_of_each_step_in_an_order_that_can_run(num_stages, count):
    first, others = overlapped_operations(num_stages, count)
    run = [(op.kind, op.stage, 0, op.microbatch) for op in first]
    for step in (1, 2):
        run += [(op.kind, op.stage, step - (not op.is_new), op.microbatch) for op in others]
    run += [(op.kind, op.stage, 2, op.microbatch) for op in others if not op.is_new]
    assert len(set(run)) == len(run) == 3 * 2 * num_stages * count
    place = {operation: n for n, operation in enumerate(run)}
    for kind, stage, step, m in run:
        if kind == FORWARD and stage:
            assert place[FORWARD, stage - 1, step, m] < place[kind, stage, step, m]
        if kind == BACKWARD:
            assert place[FORWARD, stage, step, m] < place[kind, stage, step, m]
            assert stage == num_stages - 1 or place[BACKWARD, stage + 1, step, m] < place[kind, stage, step, m]
