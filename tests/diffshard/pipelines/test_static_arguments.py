"""Static arguments of a step: for each of their values there is a pipeline, with the results of one device."""

import inspect

import jax
import pytest

import diffshard
from diffshard.pipelines.calls import StaticCall, static_call, without_static
from diffshard.pipelines.options import PipelineOptions
from tests.diffshard.pipelines.small_pipeline import arguments, check_close, train_step
from tests.diffshard.pipelines.test_pipelined_function import leave

PIPELINE = diffshard.Pipeline(
    batch_argnums=2, microbatches=(4,), schedules=("1f1b",), max_stages=2, residuals=("keep",)
)


def step(state, is_remat, batch, *, scale=1.0):
    assert isinstance(is_remat, bool)  # not traced
    new_state, (loss, largest) = train_step(state, batch, remat=is_remat)
    return new_state, (loss * scale, largest)


def search(fn=step, pipeline=PIPELINE, **options):
    cluster = diffshard.Cluster.from_devices(jax.devices()[:4], hardware="h100")
    return diffshard.search(fn, cluster, pipeline=pipeline, **options)


def test_each_value_has_a_pipeline_with_the_results_of_one_device(monkeypatch):
    leave(monkeypatch, 1, 2)
    state, batch = arguments()
    pipelined = search(static_argnums=1, static_argnames="scale", donate_argnums=())
    expected = jax.jit(step, static_argnums=1, static_argnames="scale")(state, False, batch, scale=2.0)
    check_close(pipelined(state, False, batch, scale=2.0), expected)
    assert len(pipelined.plan(state, False, batch, scale=2.0).stages) >= 2
    check_close(pipelined(state, batch=batch, is_remat=False)[1][0], expected[1][0] / 2)
    assert "2 plans" in repr(pipelined)
    ((new_state, (loss, _)),) = pipelined.steps(state, False, [batch], scale=2.0)
    check_close((new_state, loss), (expected[0], expected[1][0]))


def test_positions_move_where_a_static_argument_is_taken_out():
    options = PipelineOptions(
        fn=step,
        cluster=diffshard.Cluster.from_devices(jax.devices()[:4], hardware="h100"),
        pipeline=PIPELINE,
        donate_argnums=(0, 2),
        static_argnums=(1,),
        static_argnames=("is_remat", "scale"),
    )
    for args, kwargs in (((1, True, 2), {"scale": 3.0}), ((1,), {"is_remat": True, "batch": 2, "scale": 3.0})):
        call = static_call(options, args, kwargs)
        bound = without_static(options, call.values)
        assert list(inspect.signature(bound.fn).parameters) == ["state", "batch"]
        assert {*call.args, *call.kwargs.values()} == {1, 2}
        assert bound.donate_argnums == (0, 1)
        assert bound.pipeline.batch_argnums == (1,)
        assert bound.static_argnums == bound.static_argnames == ()


def test_a_bound_step_is_called_with_its_constants_in_their_places():
    options = PipelineOptions(
        fn=lambda a, b, c, d=4: (a, b, c, d),
        cluster=diffshard.Cluster.from_devices(jax.devices()[:4], hardware="h100"),
        pipeline=PIPELINE,
        static_argnums=(0, 2),
        static_argnames=("d",),
    )
    call = static_call(options, ("a", "b", "c"), {"d": "d"})
    assert (call.args, call.kwargs) == (("b",), {})
    assert without_static(options, call.values).fn(*call.args) == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"static_argnums": 2}, ValueError, "`static_argnums` and `Pipeline.batch_argnums` share the argument 'batch'"),
        ({"static_argnames": "batch"}, ValueError, "`Pipeline.batch_argnums` share the argument 'batch'"),
        (
            {"static_argnames": "is_remat", "donate_argnums": 1},
            ValueError,
            "`donate_argnums` \\(1,\\) and `static_argnames` \\('is_remat',\\) share the argument 'is_remat'",
        ),
        ({"static_argnums": 7}, ValueError, r"`static_argnums` \(7,\) names a position that the 3 arguments of step"),
        ({"static_argnames": "size"}, ValueError, "`static_argnames` has 'size', which is no argument of step"),
    ],
)
def test_static_arguments_that_cannot_be_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        search(**options)


def test_a_static_argument_has_to_be_hashable():
    state, batch = arguments()
    with pytest.raises(TypeError, match="The static argument 1 is list, which is not hashable"):
        search(static_argnums=1).plan(state, [True], batch)


@pytest.mark.parametrize(("one", "other"), [((1,), (1.0,)), (0.0, -0.0), (1, True), ((0.0,), (-0.0,))])
def test_equal_values_of_other_types_or_signs_are_other_constants(one, other):
    assert one == other
    keys = [StaticCall({1: value}, (), {}).key for value in (one, other)]
    assert keys[0] != keys[1]
