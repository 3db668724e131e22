"""Plans by hand: the shardings that the papers name, and programs that compute the same."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from diffshard.checks.collectives import hlo_collectives
from experiments import hand_plans
from experiments.host_devices import host_mesh, parse_mesh
from experiments.models import gpt, mlp
from experiments.models.model import Model, abstract_arguments, arguments


def small_gpt(**sizes: Any) -> Model:
    return gpt.make(batch=8, **{"layers": 1, "width": 16, "sequence": 8, "vocabulary": 32, **sizes})


def specs(model: Model, baseline: hand_plans.MakeHandPlan):
    plan = baseline(*abstract_arguments(model), host_mesh((2, 4)))
    return jax.tree.map(lambda sharding: sharding.spec, plan.state), plan


def test_megatron_splits_heads_hidden_units_and_vocabulary():
    state, plan = specs(small_gpt(), hand_plans.megatron)
    layer = state.params["layer_0"]
    assert layer["attention"]["query"]["kernel"] == P(None, "model", None)
    assert layer["attention"]["out"]["kernel"] == P("model", None, None)
    assert layer["feed_forward"]["up"] == {"kernel": P(None, "model"), "bias": P("model")}
    assert layer["feed_forward"]["down"] == {"kernel": P("model", None), "bias": P(None)}
    assert state.params["embed"]["embedding"] == P("model", None)
    assert state.opt_state[0].mu["embed"]["embedding"] == P("model", None)
    assert state.params["final_norm"]["scale"] == P(None)
    assert plan.batch.spec == P(("data",), None)
    assert plan.rules["heads"] == plan.rules["key_value_heads"] == ("model",)


def test_megatron_leaves_whole_what_does_not_divide():
    state, plan = specs(small_gpt(key_value_heads=2, vocabulary=33), hand_plans.megatron)
    assert state.params["layer_0"]["attention"]["key"]["kernel"] == P(None, None, None)
    assert state.params["embed"]["embedding"] == P(None, None)
    assert "key_value_heads" not in plan.rules
    assert "vocabulary" not in plan.rules


def test_fsdp_splits_the_largest_dimension_that_divides():
    state, plan = specs(small_gpt(), hand_plans.fsdp)
    assert state.params["layer_0"]["feed_forward"]["up"]["kernel"] == P(None, ("data", "model"))
    assert state.params["layer_0"]["attention"]["query"]["kernel"] == P(("data", "model"), None, None)
    assert state.opt_state[0].count == P()
    assert plan.batch.spec == P(("data", "model"), None)


def test_megatron_with_fsdp_splits_a_second_dimension():
    state, _ = specs(small_gpt(), hand_plans.megatron_fsdp)
    assert state.params["layer_0"]["feed_forward"]["up"]["kernel"] == P(("data",), "model")
    assert state.params["layer_0"]["feed_forward"]["down"]["kernel"] == P("model", ("data",))


def test_an_mlps_layers_are_column_and_row_parallel_in_turns():
    state, _ = specs(mlp.make(layers=2, width=8, batch=8), hand_plans.megatron)
    assert state.params == [
        {"kernel": P(None, "model"), "bias": P("model")},
        {"kernel": P("model", None), "bias": P(None)},
    ]


@pytest.fixture(scope="module")
def on_one_device() -> tuple[Model, Any, Any, Any]:
    model = small_gpt()
    state, batch = arguments(model)
    return model, state, batch, jax.jit(model.step)(state, batch)


@pytest.mark.parametrize("baseline", hand_plans.HAND_PLANS)
def test_plans_by_hand_compute_what_one_device_does(baseline: str, on_one_device):
    model, state, batch, expected = on_one_device
    plan = hand_plans.HAND_PLANS[baseline](state, batch, host_mesh((2, 4)))
    compiled = hand_plans.lower_by_hand(model.step, state, batch, plan).compile()
    found = compiled(*jax.device_put((state, batch), plan.in_shardings))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    for one, many in zip(jax.tree.leaves(expected[0].params), jax.tree.leaves(found[0].params), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-4)


def test_data_parallelism_reduces_the_gradients_and_the_loss_only():
    model, mesh = mlp.make(layers=2, width=8, batch=16), host_mesh((2, 4))
    args = abstract_arguments(model)
    compiled = hand_plans.lower_by_hand(model.step, *args, hand_plans.data_parallel(*args, mesh)).compile()
    collectives = hlo_collectives(compiled.as_text(), mesh.shape)
    assert {c.kind for c in collectives} == {"all_reduce"}
    assert sum(c.num_bytes * c.count for c in collectives) == 2 * (8 * 8 + 8) * 4 + 4


def test_a_mesh_that_is_none_is_refused():
    assert parse_mesh("2x2x2") == (2, 2, 2)
    for text in ("", "2y4", "0x8", "1x2x2x2"):
        with pytest.raises(ValueError, match="a mesh is one to three positive integers"):
            parse_mesh(text)
    with pytest.raises(RuntimeError, match="needs 64 host devices"):
        host_mesh((8, 8))
