"""Published runs rebuilt as training steps, and laws of kernels, on rows of which the truth is known."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost.measured_rates import ProductRate
from experiments import measured_kernels, published_runs
from experiments.measured_kernels import Kernels, fit_products, product_seconds
from experiments.published import data
from experiments.published.data import MissingDataError, held_out, read
from experiments.published.prediction import described, plan_of, predict
from experiments.published.runs import Run, hardware_of, runs_of
from experiments.published.scores import attend_by_scores

MPT = {
    "framework": "LLM Foundry (PyTorch FSDP1)", "model": "MPT small", "layers": 3, "hidden": 256, "heads": 4,
    "kv_heads": 4, "ffn": 1024, "vocab": 512, "seq": 1024, "global_batch": 32, "grad_accumulation": 2,
    "hardware": "h100_80gb", "num_devices": 8, "pp": 1, "precision": "amp_bf16 DEFAULT", "remat": "full",
    "step_time_s_derived": 0.01, "notes": "",
}  # fmt: skip
LLAMA = MPT | {
    "framework": "JAX (MaxText) on XLA:GPU", "model": "Llama2 small", "fsdp": 4, "micro_batch": 4, "kv_heads": 2,
    "hardware": "H100 80G SXM", "remat": "minimal_flash", "precision": "bf16",
}  # fmt: skip


def write_rows(folder, name, rows):
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def the_run(row) -> Run:
    (run,), left_out = runs_of([row])
    assert not left_out
    return run


def test_missing_rows_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    with pytest.raises(MissingDataError, match=r"kernels\.jsonl\.gz is missing"):
        read("kernels")
    for experiment in (published_runs, measured_kernels):
        experiment.main([])
        assert f"{tmp_path}" in capsys.readouterr().out


def test_a_third_of_each_family_is_held_out_always_the_same():
    families = ["a"] * 30 + ["b"] * 6 + ["c"]
    drawn = held_out(families)
    assert (drawn == held_out(families)).all()
    assert [drawn[:30].sum(), drawn[30:36].sum(), drawn[36:].sum()] == [10, 2, 0]


def test_rows_become_runs_or_say_what_is_missing():
    rows = [MPT, LLAMA, MPT | {"precision": "amp_fp8"}, MPT | {"pp": 4}, MPT | {"experts": 8}]
    runs, left_out = runs_of(rows)
    assert [run.mesh_axes for run in runs] == [{"data": 8}, {"replica": 2, "data": 4}]
    assert [run.remat for run in runs] == ["full", "products and attention"]
    assert [row.why for row in left_out] == ["numbers of 8 bits, or not stated", "a pipeline", "a mixture of experts"]


def test_a_run_is_rebuilt_in_its_layout_and_the_search_is_not_slower():
    run = the_run(MPT)
    hardware = hardware_of(run)
    published = plan_of(run, hardware)
    tokens = next(argument for argument in published.arguments if argument.shape == (32, 1025))
    assert tokens.partition_spec[0] == "data"
    calls = [o for o in published.operations if o.signature.startswith("dot_product_attention_fwd")]
    # Once forward and once more in the rematerialised backward pass, in two parts of the batch and three layers.
    assert sum(call.count for call in calls) == 2 * 2 * 3
    assert all(call.operands[0][0] == ("data",) for call in calls)
    parts = described(published, run, hardware).parts
    assert published.step_s == pytest.approx(sum(parts.values()) + _stacked_s(published))
    free = plan_of(run, hardware, is_free=True)
    assert free.step_s <= published.step_s * (1 + 1e-6)


def _stacked_s(plan):
    return sum(o.compute_s for o in plan.operations if o.signature.startswith("stack("))


def test_attention_is_priced_as_it_was_measured_or_as_a_product():
    run = the_run(MPT)
    by_prices = [predict(run, hardware_of(run, prices)).parts for prices in ("measured", "preset", "datasheet")]
    measured, preset, datasheet = (parts["attention"] for parts in by_prices)
    assert measured == pytest.approx(preset, rel=0.01), "launches aside"
    assert preset > 1.5 * datasheet > 0


def test_scores_in_memory_give_the_same_attention_and_gradients():
    arrays = [jax.random.normal(key, (2, 16, 4, 8)) for key in jax.random.split(jax.random.key(0), 3)]

    def gradients(attend):
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), (0, 1, 2))(*arrays)

    expected = gradients(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="xla"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), gradients(attend_by_scores), expected)


def test_more_remat_is_less_memory_and_more_arithmetic():
    kept, again = (the_run(MPT | {"remat": remat, "grad_accumulation": 1}) for remat in ("none", "full"))
    first, second = (predict(run, hardware_of(run, "preset")) for run in (kept, again))
    assert second.peak_bytes < first.peak_bytes
    assert second.parts["products"] > first.parts["products"]


def test_grouped_heads_and_products_that_are_kept():
    run = the_run(LLAMA)
    some = predict(run, hardware_of(run))
    full = dataclasses.replace(run, remat="full")
    assert predict(full, hardware_of(full)).parts["products"] > some.parts["products"]
    assert some.parts["attention"] > 0


def test_a_law_finds_the_numbers_behind_its_rows_and_sees_none_that_is_held_out():
    rng = np.random.default_rng(0)
    sizes = {name: 2.0 ** rng.integers(7, 14, 200) for name in ("m", "n", "k")} | {"batch": np.ones(200)}
    truth = ProductRate(2e14, 40, 200, 5e-6, 1.5e12)
    kernels = Kernels(sizes, np.ones(200), held_out(["gemm"] * 200))
    kernels = kernels._replace(seconds=product_seconds(truth, kernels))
    spoilt = kernels._replace(seconds=np.where(kernels.is_held_out, 9.0, kernels.seconds))
    fitted = fit_products(kernels)
    np.testing.assert_allclose(product_seconds(fitted, kernels), kernels.seconds, rtol=0.03)
    assert fit_products(spoilt) == fitted


def test_the_command_prints_each_run_and_takes_records_up(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    write_rows(tmp_path, "training_runs", [MPT, MPT | {"seq": 2048}, MPT | {"pp": 4}])
    options = ["--prices", "measured", "--records", str(tmp_path / "records.jsonl")]
    published_runs.main(options)
    printed = capsys.readouterr().out
    assert "a pipeline" in printed
    assert printed.count("MPT small, 8 h100 80gb, sequence 2048") >= 1
    monkeypatch.setattr(published_runs, "predict", lambda *_: pytest.fail("it is in the records"))
    published_runs.main(options)
    assert "a pipeline" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    published_runs.main(["--search", "--rows", "0"])
    assert "Published layouts and found plans" in capsys.readouterr().out
