"""A training goes on with other devices as if nothing had happened, and says at once where it cannot."""

import errno
import functools
import json
import resource
import threading
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import diffshard
from diffshard.elastic.checkpoint_files import CheckpointError, write_manifest
from diffshard.elastic.ownership import OWNER
from experiments.host_devices import host_mesh
from tests.diffshard.elastic.small_training import batch_of, init, resumed, train, train_step


@functools.cache
def uninterrupted(until: int) -> dict[int, float]:
    """Losses of the training on one device, without plans or checkpoints."""
    step, state, losses = jax.jit(train_step), init(), {}
    for number in range(until):
        state, loss = step(state, batch_of(number))
        losses[number] = float(loss)
    return losses


def assert_goes_on(losses: dict[int, float], first: int, until: int) -> None:
    assert list(losses) == list(range(first, until))
    expected = uninterrupted(10)
    np.testing.assert_allclose([*losses.values()], [expected[number] for number in losses], rtol=1e-5)


def test_losses_are_those_of_an_uninterrupted_training_on_fewer_more_and_slower_devices(tmp_path):
    assert_goes_on(train(tmp_path, 3, (2, 4), save_interval_steps=2), 0, 3)
    assert_goes_on(train(tmp_path, 5, (3, 2)), 2, 5)
    assert_goes_on(train(tmp_path, 7, (8,)), 5, 7)
    assert_goes_on(train(tmp_path, 8, (1,)), 7, 8)
    assert_goes_on(train(tmp_path, 9, (2, 4), hardware="a100", donate_argnums=0), 8, 9)


def test_a_restored_state_is_the_saved_one_in_the_new_shardings(tmp_path):
    with resumed(tmp_path, (2, 4)) as training:
        state = training.restore()
        saved = training.step(state, batch_of(0))[0]
        training.save(1, saved, {"seed": 3})
    training = resumed(tmp_path, (3, 2))
    assert (training.num_steps, training.data) == (1, {"seed": 3})
    restored = training.restore()
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(saved), training.plan.arguments, strict=False)
    for new, old, tensor in leaves:
        assert new.dtype == old.dtype
        assert new.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(training.plan.placed_mesh, tensor.partition_spec), new.ndim
        )
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(new) == jax.random.key_impl(old)
            new, old = jax.random.key_data(new), jax.random.key_data(old)
        np.testing.assert_array_equal(new, old)
    assert len({tensor.spec for tensor in training.plan.arguments}) > 1  # some are split


def test_what_is_saved_beside_the_state_is_what_it_was_at_the_save(tmp_path, monkeypatch):
    data = {"position": 1, "epochs": {"10": "ten", "9": "nine"}}
    may_write = threading.Event()

    def write_when_told(*args, **kwargs):
        assert may_write.wait(60)
        write_manifest(*args, **kwargs)

    monkeypatch.setattr("diffshard.elastic.training.write_manifest", write_when_told)
    with resumed(tmp_path) as training:
        training.save(1, training.restore(), data)
        data["position"] = 99
        may_write.set()
    assert resumed(tmp_path).data == {**data, "position": 1}


def test_what_is_saved_is_the_state_before_the_next_step_takes_its_memory(tmp_path):
    def step(state, batch):
        return {"w": state["w"] + batch}, jnp.sum(batch)

    def resume():
        options = {"donate_argnums": 0, "hardware": "h100", "max_to_keep": 5}
        return diffshard.resume(
            tmp_path, step, host_mesh((8,)), lambda: {"w": jnp.zeros((1024, 1024))}, jnp.ones(()), **options
        )

    with resume() as training:
        state = training.restore()
        for number in range(4):
            state, _ = training.step(state, jnp.ones(()))
            training.save(number + 1, state)
            state, _ = training.step(state, jnp.full((), 0.5))  # overwrites what is being written
    for name in ("00000004", "00000003"):
        with resume() as training:
            np.testing.assert_array_equal(training.restore()["w"], training.num_steps * 1.5 - 0.5)
            assert f"{training.num_steps:08d}" == name
        (tmp_path / name).rename(tmp_path / f"{name}.away")


def test_a_plan_is_used_again_where_nothing_has_changed_and_searched_where_something_has(tmp_path, monkeypatch):
    train(tmp_path, 1)
    first = resumed(tmp_path).plan
    starts = []

    def no_search(*args, start, **kwargs):
        starts.append(start)
        raise RuntimeError("searched")

    monkeypatch.setattr("diffshard.sharding_search.planning.solve", no_search)
    assert resumed(tmp_path).plan == first
    changes = [{"shape": (4, 2)}, {"hardware": "a100"}, {"memory_limit_bytes": 1e9}, {"donate_argnums": 0}]
    for change in [*changes, {"in_shardings": (None, jax.sharding.PartitionSpec("data"))}]:
        with pytest.raises(RuntimeError, match="searched"):
            resumed(tmp_path, **change)
        assert starts.pop() is not None  # but it begins with the plan


def test_a_training_goes_on_after_its_step_was_edited(tmp_path):
    def resume(num_copies):
        def step(state, batch):
            added = jnp.tanh(jnp.broadcast_to(batch, (num_copies, 8))).sum()
            return {"w": state["w"] + added}, added

        return diffshard.resume(
            tmp_path, step, host_mesh((8,)), lambda: {"w": jnp.zeros(8)}, jnp.ones(8), hardware="h100"
        )

    expected = np.zeros(8)
    for number, num_copies in enumerate((2, 4)):
        with resume(num_copies) as training:
            assert training.num_steps == number
            state, _ = training.step(training.restore(), jnp.ones(8))
            training.save(number + 1, state)
        expected += 8 * num_copies * np.tanh(1.0)
        np.testing.assert_allclose(state["w"], expected, rtol=1e-6)


def test_checkpoints_are_made_at_the_interval_and_the_newest_are_kept(tmp_path):
    train(tmp_path, 9, save_interval_steps=2, max_to_keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000006", "00000008"]


def test_a_count_of_numpy_is_saved_and_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "20240101").write_text("notes")
    with resumed(tmp_path) as training:
        assert training.save(np.int64(1), training.restore())  # pyright: ignore[reportArgumentType]
    assert resumed(tmp_path).num_steps == 1
    assert (tmp_path / "20240101").read_text() == "notes"


def test_folders_of_the_user_are_no_checkpoints(tmp_path):
    for name in ("00000000", "00000003", "20240101", "20240102.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text(name)
    with resumed(tmp_path, max_to_keep=1) as training:
        assert training.num_steps == 0
        state = training.restore()
        for number in (1, 2):
            training.save(number, state)
        with pytest.raises(CheckpointError, match="00000003` is in the way of a checkpoint"):
            training.save(3, state)
    assert resumed(tmp_path).num_steps == 2
    kept = ["00000000", "00000002", "00000003", "20240101", "20240102.removed"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == kept


def test_a_step_that_does_not_return_its_state_is_refused_before_the_search(tmp_path, monkeypatch):
    nnx = pytest.importorskip("flax.nnx")

    def in_place(model, batch):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), gradients))
        return loss

    def without_the_key(state, batch):
        new, loss = train_step(state, batch)
        return {name: array for name, array in new.items() if name != "key"}, loss

    def with_another_dtype(state, batch):
        new, loss = train_step(state, batch)
        return {**new, "half": new["half"].astype(jnp.float32)}, loss

    monkeypatch.setattr("diffshard.sharding_search.planning.solve", None)
    cases = [
        (
            in_place,
            lambda: nnx.Linear(24, 24, rngs=nnx.Rngs(0)),
            r"no result of in_place takes the place of `model.*`, float32\[24\].*`nnx.split`",
        ),
        (without_the_key, init, r"no result of without_the_key takes the place of `state\['key'\]`, key<fry>"),
        (with_another_dtype, init, r"`state\['half'\]`, bfloat16\[8\]"),
    ]
    for step, make, message in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # changes in place are told in a warning as well
            with pytest.raises(ValueError, match=message):
                diffshard.resume(tmp_path, step, host_mesh((2, 4)), make, batch_of(0), hardware="h100")


def test_a_folder_that_cannot_be_written_to_is_told_before_the_training(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied", options["dir"])

    monkeypatch.setattr("diffshard.elastic.resume.tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        resumed(tmp_path)


def test_a_forced_save_is_made_between_intervals_and_once_for_each_step(tmp_path):
    with resumed(tmp_path, save_interval_steps=4) as training:
        state = training.restore()
        saved = [training.save(number, state) for number in (3, 4)]
        saved += [training.save(number, state, {"at": number}, force=True) for number in (4, 6, 6)]
        with pytest.raises(ValueError, match="`num_steps` is 5, but there is a checkpoint of step 6 already"):
            training.save(5, state, force=True)
        saved += [training.save(number, state) for number in (7, 8)]
        training.save(9, state, force=True)
    assert saved == [False, True, False, True, False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000006", "00000008", "00000009"]
    with resumed(tmp_path, save_interval_steps=4) as training:
        assert training.num_steps == 9
        assert not training.save(9, training.restore(), force=True)


def test_modules_with_leaves_that_are_not_arrays_are_states(tmp_path):
    equinox = pytest.importorskip("equinox")

    def make():
        return equinox.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=jax.random.key(0))

    def step(model, batch):
        loss, gradients = equinox.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
        return equinox.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    def resume(shape):
        return diffshard.resume(tmp_path, step, host_mesh(shape), make, jnp.ones((8, 8)), hardware="h100")

    with resume((2, 4)) as training:
        model, loss = training.step(training.restore(), jnp.ones((8, 8)))
        training.save(1, model)
    with resume((4, 2)) as training:
        restored = training.restore()
        assert restored.activation is jax.nn.gelu
        expected = equinox.filter_jit(step)(model, jnp.ones((8, 8)))[1]
        np.testing.assert_allclose(training.step(restored, jnp.ones((8, 8)))[1], expected, rtol=1e-5)
    assert float(loss) != 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: {**init(), "half": jnp.zeros(9, jnp.bfloat16)},
            r"has `state\['half'\]` of bfloat16\[8\] where.*\[9\]",
        ),
        (lambda: {**init(), "half": jnp.zeros(8)}, r"`state\['half'\]` of bfloat16\[8\] where.*float32\[8\]"),
        (lambda: {**init(), "z": jnp.zeros(3)}, r"has 13 arrays and the state of `init` 14: only .* `state\['z'\]`"),
        (lambda: {**init(), "half": jax.random.key(0)}, r"where the state of `init` has `state\['half'\]` of key<fry>"),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_with_the_first_difference(tmp_path_factory, other, message):
    directory = _trained_once(tmp_path_factory)
    with pytest.raises(CheckpointError, match=f"checkpoint `.*00000001` .*{message}"):
        diffshard.resume(directory, train_step, host_mesh((2, 4)), other, batch_of(0))


_DIRECTORIES = []


def _trained_once(tmp_path_factory):
    if not _DIRECTORIES:
        _DIRECTORIES.append(tmp_path_factory.mktemp("trained"))
        train(_DIRECTORIES[0], 1)
    return _DIRECTORIES[0]


def test_arguments_are_checked_before_anything_is_done(tmp_path):
    directory = tmp_path / "checkpoints"
    mesh = host_mesh((2, 4))
    with pytest.raises(TypeError, match=r"`mesh` must be a jax.sharding.Mesh.*abstract"):
        diffshard.resume(directory, train_step, AbstractMesh((8,), ("data",)), init, batch_of(0))  # pyright: ignore
    with pytest.raises(TypeError, match=r"`init` must be a function without arguments.*lambda: init"):
        diffshard.resume(directory, train_step, mesh, init(), batch_of(0))  # pyright: ignore
    with pytest.raises(ValueError, match="`directory` is empty"):
        diffshard.resume("", train_step, mesh, init, batch_of(0))
    with pytest.raises(TypeError, match="`directory` must be the path of a folder, not 3"):
        diffshard.resume(3, train_step, mesh, init, batch_of(0))  # pyright: ignore
    for name in ("save_interval_steps", "max_to_keep"):
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number, 1 or more, not 0"):
            diffshard.resume(directory, train_step, mesh, init, batch_of(0), **{name: 0})
    assert not directory.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder of checkpoints, or a new one, not the file"):
        diffshard.resume(tmp_path / "file", train_step, mesh, init, batch_of(0))
    with pytest.raises(OSError, match=r"`directory` .*/proc/x. cannot be made or written to: .* Give another one"):
        diffshard.resume("/proc/x", train_step, mesh, init, batch_of(0))


def test_a_mesh_that_leaves_out_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="`mesh` has devices of 1 processes, but the job has 2"):
        resumed(tmp_path)


def test_a_batch_that_an_axis_does_not_divide_is_told(tmp_path):
    def step(state, batch):
        return state + batch.mean(), batch.mean()

    with pytest.warns(UserWarning, match=r"The 3 devices along the mesh axis 'data' divide no dimension.*\[4, 8\]"):
        diffshard.resume(tmp_path, step, host_mesh((3, 2)), lambda: jnp.zeros(()), jnp.ones((8, 4)), hardware="h100")


def test_a_save_checks_its_arguments(tmp_path):
    with resumed(tmp_path) as training:
        state = training.restore()
        training.save(2, state)
        with pytest.raises(ValueError, match="`num_steps` is 2, but there is a checkpoint of step 2 already"):
            training.save(2, state)
        with pytest.raises(ValueError, match=r"`num_steps` must be a whole number, 1 or more, not .{,200}$"):
            training.save([float(number) for number in range(1000)], state)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="`num_steps` must be a whole number, 1 or more, not 0"):
            training.save(0, state)
        with pytest.raises(ValueError, match="`data` must be JSON values"):
            training.save(3, state, {"x": np.zeros(3)})
        with pytest.raises(ValueError, match="dictionaries have text as keys, not"):
            training.save(3, state, {"seen": [{7: True}]})
        with pytest.raises(ValueError, match=r"only the state of `init` has `state\['params'\]\['up'\]`"):
            training.save(3, {**state, "params": {k: v for k, v in state["params"].items() if k != "up"}})


def test_a_plan_of_a_newer_version_is_no_loss(tmp_path):
    train(tmp_path, 1)
    folder = tmp_path / "00000001"
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "version": 99}))
    manifest = json.loads((folder / "checkpoint.json").read_text())
    raw = (folder / "plan.json").read_bytes()
    manifest["files"]["plan.json"] = [len(raw), zlib.crc32(raw)]
    del manifest["checksum"]
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "checkpoint.json").write_text(json.dumps({"checksum": checksum, **manifest}))
    with pytest.warns(UserWarning, match="search begins without the plan of the checkpoint.*version 99"):
        assert resumed(tmp_path).num_steps == 1


def test_nothing_is_saved_after_closing(tmp_path):
    training = resumed(tmp_path)
    state = training.restore()
    training.close()
    with pytest.raises(ValueError, match="`save` cannot be called after `close`"):
        training.save(2, state)


def test_a_full_disk_is_an_error_of_the_system_and_the_directory_is_given_back(tmp_path):
    """A limit of the size of files stands for the disk: what is beyond is not written."""

    def resumed_with(init):
        return diffshard.resume(tmp_path, lambda state: state + 1, host_mesh((2,)), init, hardware="h100")

    training = resumed_with(lambda: jnp.zeros((256, 1024)))
    state = training.restore()
    training.save(1, state)
    training.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        training.save(2, jax.random.normal(jax.random.key(0), state.shape))
        with pytest.raises(OSError, match="00000002") as caught:
            training.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / OWNER).exists()
    with resumed_with(lambda: state) as training:
        assert training.num_steps == 1
