"""What is sent between layers is all of a plan's collectives but those inside layers, each counted once."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.base import PlanError
from diffshard.plans.base import PredictedCollective
from diffshard.plans.file import from_json, to_json
from diffshard.plans.layers import (
    LayerFlow,
    flow_elements,
    flows_below,
    inside_element,
    layer_traffic,
    layers,
    layers_of_operations,
)
from diffshard.plans.page import format_page
from diffshard.sharding_search.plan import Plan
from tests.diffshard.plans.page_checker import checked_page
from tests.diffshard.plans.small_plan import small_plan

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Layer(nn.Module):
    """A product and a nonlinearity."""

    @nn.compact
    def __call__(self, x):
        """Returns numbers of the same shape."""
        return jnp.tanh(nn.Dense(2048, name="dense")(x))


class Network(nn.Module):
    """Three layers and a head."""

    @nn.compact
    def __call__(self, x):
        """Returns numbers of the same shape."""
        for i in range(3):
            x = Layer(name=f"layer_{i}")(x)
        return nn.Dense(2048, name="head")(x)


@pytest.fixture(scope="module")
def found():
    """A plan whose batch and columns of weights are split, so that activations are gathered or reduced on their way."""
    network = Network()

    def step(params, x):
        return jax.grad(lambda params: jnp.mean((network.apply(params, x) - x) ** 2))(params)

    x = jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    specs = jax.tree.map(lambda leaf: P(None, "model") if len(leaf.shape) == 2 else P("model"), params)
    return diffshard.search(step, MESH, hardware="h100", in_shardings=(specs, P("data"))).plan(params, x)


def plan_by_hand(**changes):
    """The small plan with a reader for each collective; both all-reduces are of gradients that the update reads."""
    all_reduces = [dataclasses.replace(c, made_by=c.operation, read_by=7) for c in small_plan().collectives[:2]]
    gather = dataclasses.replace(small_plan().collectives[2], made_by=3, read_by=4)
    return small_plan(collectives=(*all_reduces, gather), **changes)


def test_every_byte_is_between_layers_or_inside_one(found):
    traffic = layer_traffic(found, layers(found))
    between = sum(flow.num_bytes for flow in traffic.between)
    inside = sum(flow.num_bytes for flow in traffic.inside)
    assert between > 0
    assert inside > 0
    assert between + inside == pytest.approx(sum(found.collective_bytes.values()))
    seconds = sum(flow.seconds for flow in (*traffic.between, *traffic.inside))
    assert seconds == pytest.approx(found.step_s - found.compute_s)


def test_bytes_between_layers_are_those_whose_maker_and_reader_differ(found):
    def module(index):
        return next((p for p in found.operations[index].scope.split("/") if p.startswith(("layer_", "head"))), "")

    expected = sum(
        c.num_bytes * c.count
        for c in found.collectives
        if c.read_by is not None
        and found.operations[c.made_by].kind == "operation"
        and found.operations[c.read_by].kind == "operation"
        and module(c.made_by) != module(c.read_by)
        and module(c.made_by)
        and module(c.read_by)
    )
    traffic = layer_traffic(found, layers(found))
    names = {layer.name for layer in layers(found) if layer.name.startswith("Network/")}
    between = sum(e.num_bytes for e in traffic.between if e.source in names and e.target in names)
    assert between == pytest.approx(expected)
    assert between > 0


def test_every_collective_knows_who_makes_and_who_reads_its_array(found):
    for collective in found.collectives:
        # A reshard belongs to the operation that reads, everything else to the one that makes.
        assert collective.operation in (collective.made_by, collective.read_by)


def test_flows_by_hand():
    plan = plan_by_hand()
    shown = layers(plan)
    assert [layer.name for layer in shown if layer.name != "arguments"] == ["Net/layer_*", "update"]
    traffic = layer_traffic(plan, shown)
    assert traffic.between == (
        LayerFlow("Net/layer_*", "Net/layer_*", "forward", "all_gather", "model", 1.0, 2048.0, 1e-3),
        LayerFlow("Net/layer_*", "update", "backward", "all_reduce", "data", 2.0, 1024.0, 3e-3),
    )
    assert traffic.inside == ()
    page = format_page(plan)
    text = " ".join(checked_page(page).texts)
    assert "In one step, collectives move 3.00 KiB between layers and nothing inside them." in text
    assert "to the next of them, forward" in text
    assert "to update, backward" in text
    assert page.count("class=flow>") == 2


def test_each_flow_is_drawn_once_below_the_upper_of_its_layers(found):
    shown = layers(found)
    traffic = layer_traffic(found, shown)
    below = flows_below(traffic, shown)
    assert sorted(flow for flows in below for flow in flows) == sorted(traffic.between)
    order = [layer.name for layer in shown]
    for layer, flows in zip(shown, below, strict=True):
        for flow in flows:
            if flow.source in order and flow.target in order:
                assert min(order.index(flow.source), order.index(flow.target)) == order.index(layer.name)
        assert flow_elements(layer, flows, 1e9).count("class=flow>") == len(flows)


@pytest.mark.parametrize(("field", "index"), [("made_by", 8), ("made_by", -1), ("read_by", 8)])
def test_a_collective_of_an_unknown_operation_is_damage(field, index):
    document = to_json(plan_by_hand())
    document["collectives"][0][field] = index
    message = (
        "of a collective is 8, not one of 8 operations" if index > 0 else "must be a whole number, 0 or more, not -1"
    )
    with pytest.raises(PlanError, match=f"{field}` {message}"):
        from_json(document, "plan.json", Plan)


def random_plan(seed):
    """The small plan with collectives between random operations: a few kinds and axes, counts from 1 to 9."""
    rng = np.random.default_rng(seed)
    collectives = tuple(
        PredictedCollective(
            kind=str(rng.choice(["all_gather", "all_reduce"])),
            axis=str(rng.choice(["data", "model"])),
            num_bytes=float(rng.integers(1, 100) * 1024),
            count=float(rng.integers(1, 10)),
            seconds=float(rng.integers(1, 100)) * 1e-4,
            operation=int(made_by),
            link_s=1.0,
            made_by=int(made_by),
            read_by=None if rng.random() < 0.2 else int(rng.integers(3, 8)),
        )
        for made_by in rng.integers(0, 8, 12)
    )
    return small_plan(collectives=collectives)


def test_executions_bytes_and_seconds_are_those_of_the_collectives_one_by_one():
    for seed in range(20):
        plan = random_plan(seed)
        shown = layers(plan)
        layer_of = layers_of_operations(plan)
        names = {member: layer.name for layer in shown for member in layer.members}
        expected = {}
        for c in plan.collectives:
            reader = c.made_by if c.read_by is None else c.read_by
            makes, reads = layer_of[c.made_by], layer_of[reader]
            key = makes == reads, names.get(makes, makes), names.get(reads, reads), c.kind, c.axis
            total = expected.setdefault(key, np.zeros(3))
            total += [c.count, c.count * c.num_bytes, c.seconds]
        traffic = layer_traffic(plan, shown)
        found = {}
        for is_inside, flows in ((True, traffic.inside), (False, traffic.between)):
            for flow in flows:
                total = found.setdefault((is_inside, flow.source, flow.target, flow.kind, flow.axis), np.zeros(3))
                total += [flow.count, flow.num_bytes, flow.seconds]  # of all directions
        assert found.keys() == expected.keys()
        for key, total in expected.items():
            np.testing.assert_allclose(found[key], total, err_msg=f"seed {seed}: {key}")


def test_what_a_layer_sends_inside_is_told_for_one_of_the_layers_that_are_shown_as_one():
    gather = PredictedCollective("all_gather", "model", 2048.0, 3.0, 1e-3, 3, 1e-3, made_by=3, read_by=3)
    reduction = dataclasses.replace(gather, kind="all_reduce", num_bytes=512.0, count=2.0)
    first = gather, reduction
    second = [dataclasses.replace(c, operation=4, made_by=4, read_by=4) for c in first]
    plan = small_plan(collectives=(*first, *second))
    shown = layers(plan)
    (layer,) = (layer for layer in shown if layer.name == "Net/layer_*")
    assert layer.times == 2
    text = inside_element(layer, layer_traffic(plan, shown))
    assert [part.split("</div>")[0] for part in text.split("</span> ")[1:]] == ["3×, 6.00 KiB", "2×, 1.00 KiB"]
    assert text.index("all_gather model") < text.index("all_reduce model")  # what sends most comes first


def test_arrows_tell_where_a_flow_goes_and_how_much_of_the_most_it_is():
    forward = LayerFlow("a", "b", "forward", "all_gather", "data", 3.0, 2048.0, 1e-3)
    upper, lower = (layers(small_plan())[0]._replace(name=name) for name in "ab")
    text = flow_elements(upper, [forward], 8192.0)
    assert "<b>↓</b><span>to b, forward</span>" in text
    assert "3×, 2.00 KiB, 1.00 ms" in text
    assert "width:25.0%" in text
    text = flow_elements(upper, [forward._replace(source="b", target="a", direction="backward")], 0.0)
    assert "<b>↑</b><span>from b, backward</span>" in text
    assert "<b>↑</b><span>to the next" in flow_elements(
        lower, [forward._replace(source="b", direction="backward")], 1.0
    )
    assert flow_elements(upper, [], 1.0) == ""
