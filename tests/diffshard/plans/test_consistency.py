"""Plans whose fields do not fit each other are refused: the field, the rule, the value."""

import dataclasses

import pytest

from diffshard.plans.consistency import check_plan
from diffshard.plans.sections import MemoryProfile
from diffshard.plans.timeline import PredictedTimeline, PredictedWait
from tests.diffshard.plans.small_plan import small_plan

TWICE = (("data",), ("data",))


def with_spec(spec):
    first, *others = small_plan().arguments
    return small_plan(arguments=(dataclasses.replace(first, spec=spec), *others))


def test_a_plan_that_fits_is_taken():
    check_plan(small_plan())
    check_plan(with_spec((("data",), ("model",))))
    check_plan(with_spec((("data", "model"), ())))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TWICE, r"`arguments\[0\].spec` splits two dimensions over one axis"),
        ((("data", "data"), ()), "splits two dimensions over one axis"),
        (((), ("rows",)), "names 'rows', which is no axis of `mesh_axes`"),
        (((),), "has 1 dimensions, where the array has 2"),
    ],
)
def test_specs_that_cannot_be_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        check_plan(with_spec(spec))


@pytest.mark.parametrize("indices", [[0, 1], [-1, 2, 1], [-1, 1, 1], [-1, 8]])
def test_a_profile_of_memory_ascends_from_before_the_first_operation_to_the_last(indices):
    assert len(small_plan().operations) == 8
    profile = MemoryProfile(tuple((index, 1024.0) for index in indices), ())
    with pytest.raises(ValueError, match=r"`memory\.changes` must ascend from -1 to at most 7, not be"):
        check_plan(small_plan(memory=profile))
    check_plan(small_plan(memory=MemoryProfile(((-1, 512.0), (2, 1024.0), (7, 0.0)), ())))


@pytest.mark.parametrize(
    ("lower_bound_s", "wait", "message"),
    [
        (11e-3, ("all_reduce", ("data",), 1e-3, 5), r"`timeline.lower_bound_s` is 0.011, more than its seconds"),
        (6e-3, ("all_reduce", ("rows",), 1e-3, 5), r"`timeline.waits\[0\]` is of 'all_reduce' along \('rows',\)"),
        (6e-3, ("sum", ("data",), 1e-3, 5), r"is of 'sum' along \('data',\), no collective of this mesh"),
        (6e-3, ("all_reduce", ("data",), 1e-3, 5, 8), r"`timeline.waits\[0\]` must be between the 8 operations"),
    ],
)
def test_a_timeline_waits_for_the_plans_own_collectives(lower_bound_s, wait, message):
    right = PredictedTimeline(10e-3, 6e-3, {"compute": 6e-3}, (PredictedWait("all_reduce", ("data",), 1e-3, 5, 7),))
    check_plan(small_plan(timeline=right))
    with pytest.raises(ValueError, match=message):
        check_plan(small_plan(timeline=PredictedTimeline(10e-3, lower_bound_s, {}, (PredictedWait(*wait),))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": ()}, '`parameters` are .* but `arguments` has "state'),
        ({"parameters": ("state", "other")}, "`arguments` has 'batch' of none of them"),
        ({"static_argnums": (7,)}, "`static_argnums` has 7, but there are 2 `parameters`"),
    ],
)
def test_parameters_are_those_of_the_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        check_plan(small_plan(**changes))
