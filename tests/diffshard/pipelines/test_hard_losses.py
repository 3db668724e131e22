"""Steps that pipelines once refused: attention of cuDNN, rows that examples read by their own numbers, short limits."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import diffshard
from tests.diffshard.pipelines.small_pipeline import check_close
from tests.diffshard.pipelines.test_given_options import PIPELINE, search
from tests.diffshard.pipelines.test_pipelined_function import leave


def gradient_step(loss_of):
    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def normal(*shape, dtype="float32"):
    return (0.2 * jax.random.normal(jax.random.key(sum(shape)), shape)).astype(dtype)


def test_attention_of_cudnn_is_planned_and_says_where_it_runs():
    def loss(params, x):
        q, k = ((x @ params[name]).reshape(*x.shape[:2], 2, 64) for name in ("q", "k"))
        attended = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return (attended.astype(jnp.float32) ** 2).mean()

    args = {name: normal(128, 128, dtype="bfloat16") for name in ("q", "k")}, normal(8, 64, 128, dtype="bfloat16")
    step = search(gradient_step(loss), devices=1)
    assert step.plan(*args).step_s > 0
    with pytest.raises(diffshard.pipelines.StageError, match=r"cuDNN's attention .* on GPUs only"):
        step(*args)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_rows_that_examples_read_by_their_own_numbers_are_divided(is_jitted):
    def loss(params, batch):
        x, labels = batch
        logp = jax.nn.log_softmax(jnp.tanh(x @ params["a"]) @ params["b"])
        return -logp[jnp.arange(len(labels)), labels].mean()

    args = {"a": normal(16, 32), "b": normal(32, 10)}, (normal(32, 16), jnp.arange(32) * 7 % 10)
    step = gradient_step(jax.jit(loss) if is_jitted else loss)
    expected = jax.jit(step)(*args)
    check_close(search(step, devices=2)(*args), expected)
    check_close(jax.jit(diffshard.pipelines.in_microbatches(step, 4))(*args), expected)


def of_separate_layers(params, x):
    for name in ("a", "b", "c", "d"):
        x = jnp.tanh(x @ params[name].astype(x.dtype))
    return (x**2).mean()


def of_scanned_layers(params, x):
    x, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["layers"])
    return ((x @ params["out"]) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "params", "devices", "limit"),
    [
        (of_separate_layers, {name: normal(32, 32) for name in ("a", "b", "c", "d")}, 2, None),
        (of_scanned_layers, {"layers": normal(4, 32, 32), "out": normal(32, 32)}, 4, 50e3),
    ],
    ids=["two devices", "stages that split each gradient over two devices"],
)
def test_replicas_whose_gradients_lie_in_parts_have_the_scores_of_whole_ones(loss, params, devices, limit, monkeypatch):
    """A pass over other data goes from stage to stage, and parts of squared norms are added up: no gradient travels."""
    gradients_of = diffshard.robust_gradients.zeno(loss, num_replicas=2, num_dropped=1, step_size=0.1)

    def step(params, x, check):
        value, gradients, report = gradients_of(params, x, check)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, report

    args = params, normal(32, 32).at[16:].mul(-3.0), normal(8, 32)
    leave(monkeypatch, devices // 2, 2)
    pipeline = dataclasses.replace(PIPELINE, max_stages=2)
    pipelined = search(step, pipeline, devices=devices, memory_limit_bytes=limit)
    assert len(pipelined.plan(*args).stages) == 2
    found, expected = pipelined(*args), jax.jit(step)(*args)
    check_close(found, expected)
    assert int(found[2].kept.sum()) == 1
    prepared = next(iter(pipelined._prepared.values())).found
    staged, homes = prepared.staged, dict(zip(prepared.staged.inputs, prepared.staged.homes, strict=True))
    specs = []
    for label, program in staged.programs.items():
        for key in program.reads if label.kind in ("begin", "finish") else ():
            maker = staged.makers.get(key)
            is_of_weights = staged.avals[key].shape[-2:] == (32, 32)
            stage = homes[key] if maker is None else maker.stage
            assert not is_of_weights or stage == label.stage, "a stage reads weights or gradients of another one"
            if is_of_weights and maker is not None and maker.kind == "backward":
                assert staged.avals[key].shape[0] == 2  # replicas
                specs.append(prepared.plans.sharding(label.stage, key).spec)
    assert specs
    assert limit is None or any("x" in spec[1:] for spec in specs), "no replica's gradient is split over devices"


def test_a_loop_that_each_example_ends_by_itself_is_divided():
    def loss(params, x):
        hidden = jnp.tanh(x @ params["a"])
        start = jax.lax.stop_gradient(jnp.abs(hidden)) + 0.1
        grown = jax.vmap(lambda h: jax.lax.while_loop(lambda h: h.sum() < 9.0, lambda h: h * 1.5, h))(start)
        return (((hidden + grown) @ params["b"]) ** 2).mean()

    args = {"a": normal(16, 32), "b": normal(32, 10)}, normal(32, 16)
    step = gradient_step(loss)
    check_close(search(step, devices=2)(*args), jax.jit(step)(*args))


def test_rows_in_another_order_are_still_refused():
    def loss(params, batch):
        x, labels = batch
        return (x @ params)[jnp.arange(32)[::-1], labels].mean()

    with pytest.raises(ValueError, match=r"gather .* mixes the examples of a batch"):
        search(gradient_step(loss)).plan(normal(16, 4), (normal(32, 16), jnp.arange(32) % 4))


def test_a_search_that_has_no_time_says_so_and_not_that_nothing_fits(monkeypatch):
    def loss(params, x):
        return (jnp.tanh(x @ params) ** 2).mean()

    args = normal(16, 16), normal(32, 16)
    monkeypatch.setattr("diffshard.pipelines.options._PATIENCE_S", 0.0)
    with pytest.raises(TimeoutError, match=r"`time_limit_s` 1e-06 ended the search .* nothing says that none fits"):
        search(gradient_step(loss), time_limit_s=1e-6).plan(*args)
    with pytest.raises(diffshard.InfeasibleError, match="No pipeline of step"):
        search(gradient_step(loss), time_limit_s=1e-6, memory_limit_bytes=100.0).plan(*args)


def switch_loss(params, x):
    """The loss of a mixture with a balancing term, whose means are over the second dimension."""
    chances = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(chances, -1), 4).mean(1)
    hidden = jnp.tanh(x @ params["up"]) @ params["down"]
    return (hidden**2).mean() + 0.1 * 4 * (chosen * chances.mean(1)).sum(-1).mean()


def test_a_balancing_loss_over_groups_is_divided_and_one_over_the_batch_says_how():
    params = {"router": normal(16, 4), "up": normal(16, 32), "down": normal(32, 16)}
    args = params, normal(8, 4, 16)
    check_close(search(gradient_step(switch_loss))(*args), jax.jit(gradient_step(switch_loss))(*args))
    over_batch = gradient_step(lambda params, x: switch_loss(params, x[None]))
    with pytest.raises(ValueError, match=r"give the batch as `\[groups, examples, ...\]`"):
        search(over_batch).plan(params, normal(32, 16))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_gradients_may_have_means_of_their_own_microbatch(num_stages, monkeypatch):
    params, x = {"router": normal(16, 4), "up": normal(16, 32), "down": normal(32, 16)}, normal(32, 16)

    def loss(params, x):
        return switch_loss(params, x[None])

    leave(monkeypatch, 1, num_stages)

    def mean_of_microbatches(params, x):
        return jnp.mean(jnp.stack([loss(params, x[m::4]) for m in range(4)]))

    pipeline = dataclasses.replace(PIPELINE, batch_means="each_microbatch", max_stages=2)
    step = search(gradient_step(loss), pipeline, devices=2)
    plan = step.plan(params, x)
    assert len(plan.stages) == num_stages
    assert any("Gradients have means of their micro-batch" in note and "loss" in note for note in plan.notes)
    new_params, value = step(params, x)
    check_close(value, loss(params, x))  # that of the whole batch
    expected, _ = gradient_step(mean_of_microbatches)(params, x)
    check_close(new_params, expected)
    of_batch, _ = gradient_step(loss)(params, x)
    assert float(jnp.abs(new_params["router"] - of_batch["router"]).max()) > 1e-5  # there is a difference to find
    check_close(plan.apply(gradient_step(loss), step.options.cluster)(params, x), (expected, value))
    with pytest.raises(ValueError, match=r'`check` "numbers" cannot be given together with `Pipeline\(batch_means'):
        search(gradient_step(loss), pipeline, check="numbers").plan(params, x)


def test_what_examples_themselves_read_of_the_batch_stays_refused():
    def loss(params, x):
        hidden = x @ params
        return ((hidden - hidden.mean(0)) ** 2).mean()  # as batch normalisation

    pipeline = dataclasses.replace(PIPELINE, batch_means="each_microbatch")
    with pytest.raises(ValueError, match="needs a result of the whole batch before"):
        search(gradient_step(loss), pipeline).plan(normal(16, 4), normal(32, 16))
    with pytest.raises(ValueError, match=r"`Pipeline.batch_means` must be one of"):
        dataclasses.replace(PIPELINE, batch_means="none")
    with pytest.raises(ValueError, match=r'batch_means="each_microbatch"\)` cannot .* `gradient_reductions` \(.*once'):
        dataclasses.replace(pipeline, gradient_reductions=("each_microbatch", "once"))
