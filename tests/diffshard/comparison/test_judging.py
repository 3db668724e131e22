"""What is compiled of a plan, and what its row says of the program, with a stand-in for the compiler."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.checks.compilation import CompiledStep
from diffshard.checks.hlo import MemoryPlan
from diffshard.checks.targets import Target
from diffshard.comparison import compare
from diffshard.comparison.compare import CompilablePlan, judge
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.tracing import space_of, trace_function
from tests.diffshard.checks.small_schedules import RATES, program
from tests.diffshard.comparison.small_step import BATCH, MESH, STATE, step

HARDWARE = diffshard.preset("h100", dict(MESH.shape))
TARGET = Target("host with the rates of a toy", rates=RATES)


@pytest.fixture(scope="module")
def compilable():
    """A found plan of the small step, whose state is donated, as a program for each device."""
    options = Options(fn=step, mesh=MESH, hardware=HARDWARE, memory_limit_bytes=1e9, donate_argnums=(0,))
    plan = diffshard.search(step, MESH, hardware=HARDWARE, donate_argnums=0, executor="program").plan(STATE, BATCH)
    traced_function = trace_function(options, (STATE, BATCH))
    return CompilablePlan("found", plan, traced_function, space_of(options, traced_function))


def compiled_to(monkeypatch, memory=None, num_involuntary=0, *instructions):
    """Lets every job compile to one program; returns the jobs."""
    compiled_jobs = {}

    def compile_steps(jobs, *, timeout_s):
        del timeout_s
        compiled_jobs.update(jobs)
        return {name: CompiledStep(program(*instructions), memory, num_involuntary, 1.0) for name in jobs}

    monkeypatch.setattr(compare, "compile_steps", compile_steps)
    return compiled_jobs


def test_a_plan_is_compiled_with_its_donated_arguments_and_options(monkeypatch, compilable):
    jobs = compiled_to(monkeypatch)
    by_constraints = compilable._replace(plan=dataclasses.replace(compilable.plan, executor="constraints"))
    judge([compilable, by_constraints], TARGET)
    assert [job.donate_argnums for job in jobs.values()] == [(0, 1), (0, 1)]  # both matrices
    # Only a program for each device has several collectives under way at a time.
    assert [len(job.compiler_options) for job in jobs.values()] == [1, 0]


def test_a_row_says_what_the_program_takes(monkeypatch, compilable):
    custom = '%k = f32[5]{0} custom-call(%b), custom_call_target="mine"'
    compiled_to(monkeypatch, MemoryPlan(600, 500, 400, 300), 2, custom)
    at_the_limit, beyond = (
        compilable._replace(plan=dataclasses.replace(compilable.plan, memory_limit_bytes=limit))
        for limit in (1000.0, 999.0)
    )
    fitting, exceeding = judge([at_the_limit, beyond], TARGET)
    assert (fitting.fits, exceeding.fits) == (True, False)
    assert fitting.compiled_peak_bytes == 1000
    assert fitting.timeline_s == fitting.computing_s == 4  # 20 bytes read and 20 written, at 10 a second
    assert fitting.notes == (
        "XLA's partitioner replicates 2 arrays on the way between two shardings.",
        "custom call 'mine' is priced by its bytes alone",
    )
    assert exceeding.notes[1] == "It does not fit the memory limit of 999 B."


def test_a_plan_that_cannot_be_lowered_loses_its_own_row_only(monkeypatch, compilable):
    jobs = compiled_to(monkeypatch)
    broken = compilable._replace(plan=dataclasses.replace(compilable.plan, operations=()))
    failed, fine = judge([broken, compilable], TARGET)
    assert list(jobs) == ["1"]
    assert failed.notes[0].startswith("It could not be lowered: PlanError: ")
    assert (failed.compiled_sent_bytes, failed.timeline_s) == (None, None)
    assert fine.timeline_s is not None


def compared(monkeypatch, *args, **options):
    """What `compare` would compile."""
    compiled = []

    def judge(plans, target, *, timeout_s):
        del target, timeout_s
        compiled.extend(plans)
        return []

    monkeypatch.setattr(compare, "judge", judge)
    return compiled, diffshard.compare(step, MESH, *(args or (STATE, BATCH)), target="host", **options)


def test_plans_are_compared_with_their_own_arguments_and_shardings_with_the_given_ones(monkeypatch, compilable):
    plans = {"found": compilable.plan, "by hand": (P(), P("data"))}
    (found, by_hand), _ = compared(monkeypatch, plans=plans, memory_limit_bytes=1e8)
    assert found.traced_function.call.donated == (True, True, False)
    assert by_hand.traced_function.call.donated == (False, False, False)
    assert by_hand.plan.hardware == HARDWARE  # that of the plan beside it
    assert (found.plan.memory_limit_bytes, by_hand.plan.memory_limit_bytes) == (HARDWARE.memory_bytes, 1e8)


def test_a_plan_is_traced_under_its_own_rules_for_activations(monkeypatch, compilable):
    rules = []

    def trace(options, args):
        rules.append(options.logical_axis_rules)
        return trace_function(options, args)

    monkeypatch.setattr(compare, "trace_function", trace)
    plan = dataclasses.replace(compilable.plan, logical_axis_rules=(("mlp", ("model",)),))
    compared(monkeypatch, plans={"expert": plan})
    assert rules == [(("mlp", ("model",)),)]


def test_a_plan_for_other_arguments_is_refused(monkeypatch, compilable):
    longer = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    with pytest.raises(diffshard.PlanError, match=r"\[128, 64\].*\[256, 64\]"):
        compared(monkeypatch, STATE, longer, plans={"found": compilable.plan})
