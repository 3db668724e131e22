"""google-parallax beside found plans: a library of the same interface, and the real one where it is installed."""

import enum
import importlib.util
import sys
import types
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from experiments import parallax as experiment
from experiments.host_devices import host_mesh
from experiments.parallax import MODELS, Refusal, hand_plan, specs_of


def small(name: str) -> experiment.Rival:
    make, _, sizes = MODELS[name]
    return make(**sizes)


def stand_in(create_sharded_model) -> types.ModuleType:
    """Returns a library with the two names of google-parallax that are used."""
    module: Any = types.ModuleType("parallax")
    module.ShardingStrategy = enum.Enum("ShardingStrategy", ["AUTO", "FSDP"])
    module.create_sharded_model = create_sharded_model
    return module


def by_last_dimension(network, inputs, strategy):
    variables = network.init(jax.random.key(0), *inputs)
    return jax.tree.map(lambda x: jax.reshard(x, P(*[None] * (x.ndim - 1), "model")), variables)


def test_what_is_missing_is_said(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert experiment.main([]) == 1
    assert "pip install google-parallax" in capsys.readouterr().err


def test_a_plan_splits_the_optimizers_arrays_as_their_parameters(monkeypatch):
    monkeypatch.setitem(sys.modules, "parallax", stand_in(by_last_dimension))
    mesh, rival = host_mesh((4, 2)), small("mixer")
    specs = specs_of(rival, "AUTO", mesh)
    assert isinstance(specs, dict)
    assert specs["head", "kernel"] == ((32, 10), P(None, "model"))
    state = hand_plan(specs, P("data"), rival.model, mesh).state
    moments = state.opt_state[0]
    for tree in (state.params, moments.mu, moments.nu):
        assert tree["params"]["head"]["kernel"].spec == P(None, "model")
    assert moments.count.spec == P()


def test_where_the_library_stops_is_said(monkeypatch):
    def create_sharded_model(network, inputs, strategy):
        equations = jax.make_jaxpr(lambda x: jax.numpy.sin(x))(1.0).eqns
        raise AssertionError(equations[0])

    monkeypatch.setitem(sys.modules, "parallax", stand_in(create_sharded_model))
    refusal = specs_of(small("mixer"), "AUTO", host_mesh((4, 2)))
    assert isinstance(refusal, Refusal)
    assert (refusal.primitive, refusal.words.endswith("the operation sin")) == ("sin", True)


def test_the_command_times_what_the_library_takes(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "parallax", stand_in(by_last_dimension))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(experiment, "STRATEGIES", {"AUTO": P("data")})
    rows = tmp_path / "rows.jsonl"
    options = ["--models", "mixer", "--sizes", "small", "--target", "host", "--time-limit", "1", "-o", str(rows)]
    assert experiment.main(options) == 0
    printed = capsys.readouterr().out
    assert "takes it, and splits 100% of the parameters" in printed
    assert [line.split('"plan": "')[1].split('"')[0] for line in rows.read_text().splitlines()] == [
        "found", "parallax AUTO"
    ]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("parallax") is None, reason="google-parallax is not installed")
def test_the_real_library_takes_a_gpt_and_stops_at_remat():
    mesh = host_mesh((4, 2))
    specs = specs_of(small("gpt"), "AUTO", mesh)
    assert not isinstance(specs, Refusal)
    assert any("model" in spec for _, spec in specs.values())
    refusal = specs_of(small("decoder"), "AUTO", mesh)
    assert isinstance(refusal, Refusal)
    assert "remat" in refusal.primitive
    with experiment.without_remat():
        assert not isinstance(specs_of(small("decoder"), "AUTO", mesh), Refusal)
