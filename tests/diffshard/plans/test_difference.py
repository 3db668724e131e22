"""What differs between two plans, on plans made by hand and on plans of different functions, meshes and hardware."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import diffshard
from diffshard.plans.difference_data import align_operations
from diffshard.plans.printing import TEXT_WIDTH
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import operation, small_plan

MESH = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def changed_plan():
    """The plan made by hand with another spec of an argument, and without the gather of the update."""
    plan = small_plan()
    arguments = (dataclasses.replace(plan.arguments[0], spec=((), ())), *plan.arguments[1:])
    operations = (*plan.operations[:-1], dataclasses.replace(plan.operations[-1], value_specs=(((), ()),)))
    return dataclasses.replace(
        plan, arguments=arguments, operations=operations, collectives=plan.collectives[:2], executor="program"
    )


def test_a_plan_does_not_differ_from_itself():
    difference = small_plan().diff(small_plan())
    assert difference.arguments == difference.outputs == difference.layers == difference.operations == ()
    assert difference.notes == ()
    assert all(total.first == total.second for total in difference.totals)
    assert "Arguments: 0 of 3 differ" in str(difference)


def test_what_each_plan_holds_sends_and_costs():
    difference = small_plan().diff(changed_plan())
    (argument,) = difference.arguments
    assert argument == ("state/layer_0/w", "float32[16,16]", (((), ("model",)), ((), ())), (256.0, 1024.0))
    totals = {total.name: (total.first, total.second) for total in difference.totals}
    assert totals["step"] == pytest.approx((10e-3, 9e-3))
    # All-reduces of 512 bytes over two devices send them once, the gather of 2048 bytes over four three quarters.
    assert totals["sent by a device"] == pytest.approx((2 * 512 + 0.75 * 2048, 2 * 512))
    assert totals["arguments on a device"] == (768, 1536)
    (layer,) = difference.layers
    assert layer.name == "update"
    assert layer.communicate_s == (1e-3, 0.0)
    assert layer.sent_bytes == (1536.0, 0.0)
    (changed,) = difference.operations
    assert changed.name == "scale/add"
    assert changed.collectives == ((("all_gather", "model"),), ())
    assert changed.seconds == (1e-3, 0.0)
    assert difference.counts == (3, 2, 4, 5)


def test_what_is_sent_in_each_trip_of_a_loop_counts_as_often():
    plan = small_plan()
    first, *others = plan.collectives
    often = dataclasses.replace(plan, collectives=(dataclasses.replace(first, count=3.0), *others))
    totals = {total.name: (total.first, total.second) for total in plan.diff(often).totals}
    assert totals["sent by a device"] == pytest.approx((2 * 512 + 0.75 * 2048, 4 * 512 + 0.75 * 2048))


TEXT = """\
Difference of two plans

  first   train_step on 8 devices (data 2 x model 4), toy, by constraints
  second  train_step on 8 devices (data 2 x model 4), toy, by program

Totals

                            first    second    change
  step                    10.0 ms   9.00 ms    -10.0%
  computing               6.00 ms   6.00 ms  the same
  communicating           4.00 ms   3.00 ms    -25.0%
  sent by a device       2.50 KiB  1.00 KiB    -60.0%
  arguments on a device     768 B  1.50 KiB   +100.0%
  peak memory            1.00 KiB  1.00 KiB  the same

Arguments: 1 of 3 differ

                                     sharding              on a device
  name               type            first     second            first    second
  state/layer_0/w    float32[16,16]  ·, model  replicated        256 B  1.00 KiB

Results: 0 of 2 differ

Layers: 1 of 4 differ

            computes            waits             sends
  name         first  second    first  second     first  second
  update           -       -  1.00 ms       -  1.50 KiB       -

Operations: 1 of 5 that both functions have differ

                                          sharding                takes
  name                    result          first     second        first  second
  scale/add               float32[16,16]  ·, model  replicated  1.00 ms       -
    + all_gather model                    yes"""


def test_text_and_page_say_each_number_in_its_place():
    difference = small_plan().diff(changed_plan())
    assert str(difference) == TEXT
    assert max(map(len, TEXT.splitlines())) <= TEXT_WIDTH
    page = "|".join(checked_page(difference.html()).texts)
    head = "Difference of two plans|first: train_step on 8 devices (data 2 x model 4), toy, by constraints|second: "
    tables = (
        "Totals|first|second|change|step|10.0 ms|9.00 ms|-10.0%|computing|6.00 ms|6.00 ms|the same|communicating|"
        "4.00 ms|3.00 ms|-25.0%|sent by a device|2.50 KiB|1.00 KiB|-60.0%|arguments on a device|768 B|1.50 KiB|+100.0%|"
        "peak memory|1.00 KiB|1.00 KiB|the same|Arguments: 1 of 3 differ|name|type|sharding: first|sharding: second|"
        "on a device: first|on a device: second|state/layer_0/w|float32[16,16]|·, model|replicated|256 B|1.00 KiB|"
        "Results: 0 of 2 differ|Layers: 1 of 4 differ|name|computes: first|computes: second|waits: first|"
        "waits: second|sends: first|sends: second|update|-|-|1.00 ms|-|1.50 KiB|-|Operations: 1 of 5 that both "
        "functions have differ|name|result|sharding: first|sharding: second|takes: first|takes: second|scale/add|"
        f"float32[16,16]|·, model|replicated|1.00 ms|-|  + all_gather model|yes|As text|{TEXT}|"
    )
    assert head in page
    assert tables in page
    assert "srcdoc" in difference._repr_html_()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (6e-3, 6e-3, "the same"), (0.0, 6e-3, "new"), (6e-3, 0.0, "-100.0%"), (6e-3, 6.002e-3, "below 0.1%"),
        (6e-3, 6.004e-3, "+0.1%"), (6e-3, 3e-3, "-50.0%"), (1e-3, 10.9e-3, "+990.0%"), (1e-3, 12e-3, "12 times"),
    ],
)  # fmt: skip
def test_a_change_is_told_as_a_share_or_as_a_multiple(first, second, words):
    plans = [dataclasses.replace(small_plan(), compute_s=compute_s) for compute_s in (first, second)]
    (row,) = [line for line in str(plans[0].diff(plans[1])).splitlines() if line.startswith("  computing ")]
    assert row.split("  ")[-1].strip() == words


def test_functions_meshes_and_hardware_that_differ_are_said():
    def step(w, x):
        return w - 0.1 * (x.T @ (x @ w))

    def other_step(w, x):
        return w - 0.1 * (x.T @ jnp.tanh(x @ w))

    plan = diffshard.search(step, MESH, hardware="h100", solver="exact").plan(W, X)
    wide = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (PartitionSpec(), PartitionSpec("data"))
    search = diffshard.search(other_step, wide, hardware="a100", solver="exact", in_shardings=specs)
    difference = plan.diff(search.plan(W, X))
    functions, meshes, hardware = difference.notes
    assert "The functions differ from operation" in functions
    assert "the second has tanh(float32[16,8]) -> float32[16,8]" in functions
    assert "0 operations of the first and 1 of the second have no partner" in functions
    assert "4 devices (data 2 x model 2) and 8 devices (data 4 x model 2)" in meshes
    assert "H100-80GB and A100-80GB" in hardware
    assert difference.counts[3] == len(plan.operations) - 2
    assert [a.path for a in difference.arguments]


def test_arrays_that_only_one_plan_has_are_named():
    plan = small_plan()
    more = dataclasses.replace(plan.arguments[0], path="extra")
    input_operation = dataclasses.replace(plan.operations[0], signature="input() -> float32[1]")
    longer = dataclasses.replace(
        plan,
        arguments=(*plan.arguments, more),
        operations=(*plan.operations[:3], input_operation, *plan.operations[3:]),
    )
    longer = dataclasses.replace(longer, collectives=())
    (extra,) = plan.diff(longer).arguments
    assert extra.specs == (None, more.spec)
    assert extra.device_bytes == (0.0, 256.0)
    assert "not there" in str(plan.diff(longer))
    with pytest.raises(TypeError, match="`other` must be a Plan, which is compared with its own kind, not a str"):
        plan.diff("plan.json")  # pyright: ignore[reportArgumentType]


def plan_of_operations(*layers, per_layer=1):
    """A plan whose operations are those of layers, given by name and kinds, each list repeated."""
    operations = [
        operation(f"{kind}(float32[8]) -> float32[8]", f"jvp(Net)/{name}", ((),), 1e-3)
        for name, kinds in layers
        for kind in list(kinds) * per_layer
    ]
    return dataclasses.replace(small_plan(), arguments=(), operations=tuple(operations), collectives=(), outputs=())


def test_thousands_of_operations_are_aligned_layer_by_layer():
    names = [f"layer_{i}" for i in range(5)]
    first = plan_of_operations(*((name, ["tanh", "mul"]) for name in names), per_layer=500)
    second = plan_of_operations(*((name, ["exp", "tanh", "mul"]) for name in names), per_layer=500)
    difference = first.diff(second)
    assert difference.counts[3] == len(first.operations) == 5000
    (note,) = difference.notes
    assert "0 operations of the first and 2,500 of the second have no partner" in note
    assert "differ from operation 0 on" in note


def test_operations_that_are_too_many_to_align_are_not_said_to_have_no_partner():
    first = plan_of_operations(("layer", ["tanh", "mul"]), ("head", ["exp"]), per_layer=3000)
    second = plan_of_operations(("layer", ["mul", "tanh"]), ("head", ["log"]), per_layer=3000)
    difference = first.diff(second)
    differ, not_compared = difference.notes
    assert "3,000 operations of the first and 3,000 of the second have no partner" in differ
    assert "6,000 operations of the first and 6,000 of the second are in layers with too many" in not_compared
    assert "not compared one by one" in " ".join(str(difference).split())
    assert difference.counts[3] == 0


OPERATIONS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["tanh", "mul", "exp"])), max_size=6)


def most_points(one, other):
    """Two points for each pair of the best alignment, three where both are of one layer, by trying all of them."""
    if not one or not other:
        return 0
    pair = 2 + (one[0][0] == other[0][0]) if one[0][1] == other[0][1] else -100
    return max(most_points(one[1:], other), most_points(one, other[1:]), pair + most_points(one[1:], other[1:]))


@given(OPERATIONS, OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_no_alignment_has_more_pairs_or_better_ones(one, other):
    one, other = [("start", "log"), *one, ("end", "log")], [("start", "sin"), *other, ("end", "sin")]
    first, second = (plan_of_operations(*((layer, [kind]) for layer, kind in each)) for each in (one, other))
    pairs, not_compared = align_operations(first, second)
    assert not_compared == (0, 0)
    assert all(one[i][1] == other[j][1] for i, j in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert sum(2 + (one[i][0] == other[j][0]) for i, j in pairs) == most_points(one[1:-1], other[1:-1])


def test_equal_operations_are_matched_in_their_own_layer():
    first = plan_of_operations(("a", ["exp"]), ("b", ["tanh"]), ("c", ["tanh"]), ("d", ["exp"]))
    second = plan_of_operations(("z", ["log"]), ("c", ["tanh"]), ("y", ["log"]))
    assert align_operations(first, second) == ([(2, 1)], (0, 0))
    assert align_operations(second, first) == ([(1, 2)], (0, 0))
