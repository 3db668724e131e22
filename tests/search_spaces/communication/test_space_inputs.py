"""Spaces, choices and meshes that do not fit are refused before anything runs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from search_spaces.communication.base import INT8
from search_spaces.communication.call_sites import alternatives
from search_spaces.communication.strategies import Encode, ErrorFeedback, EveryK, Exact, Schedule
from tests.search_spaces.communication.small_communication import (
    BATCH,
    KEY,
    PARAMS,
    SPACE,
    SPECS,
    WIDTH,
    seconds,
    small_space,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tie": "all"}, "`tie` must be 'type' or None, not 'all'"),
        ({"strategies": {"sideways": (Exact(),)}}, "`strategies` has a direction 'sideways'"),
        ({"strategies": {"forward": ["int8"]}}, r"has \['int8'\]; give strategies"),
        ({"strategies": {"forward": ()}}, r"`strategies\['forward'\]` must be at least one"),
        ({"strategies": {"forward": (EveryK(2),)}}, "which keep residuals; these are for gradients only"),
        ({"strategies": {"gradient": (ErrorFeedback(INT8),) * 2}}, "each with its own name"),
        ({"specs": {**SPECS, "head": P("rows")}}, "`params` 'head' has an axis 'rows'"),
        ({"specs": {**SPECS, "head": P("model", "model")}}, "'model' splits two"),
        ({"specs": {**SPECS, "head": P(None, None, "model")}}, "with 3 dimensions"),
        ({"specs": {"head": P()}}, "The specs of `params` must be"),
        ({"batch_specs": P(("data", "model"), "data")}, "'data' splits two"),
        ({"params": {**PARAMS, "head": jnp.ones((WIDTH, 16), int)}}, "'head' is int32; parameters must be floating"),
        ({"fn": lambda params, batch: batch[0]}, "`loss_fn` must return one floating-point scalar"),
        (
            {"fn": lambda params, batch: lax.psum(batch[0].sum(), "model", axis_index_groups=[[0, 1], [2, 3]])},
            "a psum with `axis_index_groups` in the function",
        ),
        ({"hardware": "h1000"}, "`hardware` 'h1000' is unknown"),
        (
            {"fn": lambda params, batch: lax.psum(1.0 * batch[0].sum(), "modle")},
            "uses a mesh axis 'modle', but `mesh_axes` has",
        ),
        ({"batch": (jnp.ones((3, WIDTH)), jnp.ones((3, WIDTH)))}, r"Dimension 0 of `batch` '0' is 3"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small_space(**options)


def test_choices_and_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one entry for each of 4 groups, got 1"):
        SPACE.loss(PARAMS, BATCH, [0], KEY)
    with pytest.raises(ValueError, match="must be 0 to 1, not 2"):
        seconds(SPACE, [2, 0, 0, 0])
    with pytest.raises(ValueError, match="must be an integer or 2 weights"):
        SPACE.loss(PARAMS, BATCH, [jnp.ones(3), 0, 0, 0], KEY)
    with pytest.raises(ValueError, match="`hardware` is None"):
        _ = small_space(hardware=None).problem
    with pytest.raises(ValueError, match="have no exact strategy"):
        small_space(strategies={"forward": (Encode(INT8),)}).exact_choice()
    with pytest.raises(ValueError, match="`mesh` has axes"):
        SPACE.on_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)))
    with pytest.raises(ValueError, match="`k` must be at least 2, not 1"):
        EveryK(1)
    with pytest.raises(ValueError, match="`switch_step` must lie between 0 and `num_steps`"):
        Schedule(Exact(), Encode(INT8), 0, 10)
    for functions in ({"only": lambda x: x}, [jnp.sin, jnp.cos], {"one": jnp.sin, "other": 1}):
        with pytest.raises(ValueError, match="must be a dict of at least two functions by label"):
            alternatives("one", functions, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as raised:
        alternatives("mixer", {"sum": jnp.sum, "same": lambda x: x}, jnp.ones(3))
    assert "alternatives 'mixer' of sum, same" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("make", [Exact, partial(Encode, INT8), partial(ErrorFeedback, INT8), partial(EveryK, 2)])
@pytest.mark.parametrize("fact", ["is_exact", "keeps_residual"])
def test_whether_a_strategy_is_exact_is_no_argument(make, fact):
    with pytest.raises(TypeError, match=fact):
        make(**{fact: True})
