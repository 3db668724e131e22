"""Plans of google-parallax, another library that splits JAX models, beside found ones, compiled for H100s.

    pip install google-parallax==0.0.2
    python -m experiments.parallax [--models gpt decoder] [--mesh 4x2] [-o rows.jsonl]

`parallax.create_sharded_model` is called as its users call it, on flax's Linen or nnx modules, with its strategies AUTO
and FSDP. It is called under `jax.eval_shape` on a mesh with explicit axes, so that the types of its results say how it
splits each parameter, at full size and without a device. The optimizer's state is split as the parameters are; the
batch over "data" with AUTO, and over both axes with FSDP. XLA's propagation does the rest, as it does for its users. A
model that AUTO refuses because of `nn.remat` is given to it again without. Programs are compiled and played back as in
`experiments.timeline`.
"""

import argparse
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffshard.checks.timeline import COMPUTE
from experiments.hand_plans import HandPlan
from experiments.host_devices import parse_mesh
from experiments.models import decoder, gpt, gpt_nnx, mixer, moe, vision_transformer
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline import HARDWARE, Setting, time_plan
from experiments.timeline_table import FOUND, Row, append_row, cells

STRATEGIES = {"AUTO": P("data"), "FSDP": P(("data", "model"))}
"""Those of its strategies that split parameters, and how the batch is split."""
NOT_INSTALLED = (
    "google-parallax is not installed in this environment: pip install google-parallax==0.0.2, then run this again."
)
COLUMNS = ("model", "plan", "ms", "over found", "computing ms", "waits ms", "sent GB", "peak GiB")
_TEXT = {"vocabulary": 32768, "sequence": 1024}
_SMALL_TEXT = {"layers": 1, "width": 64, "heads": 8, "vocabulary": 256, "sequence": 32}
_DECODER = {"heads": 16, "key_value_heads": 8, "width": 2048, "layers": 2, **_TEXT}


class Rival(NamedTuple):
    """A model as both libraries take it.

    Attributes:
      network: a Linen module, or a function that makes an nnx module.
      inputs: abstract arguments of the network.
      model: the training step, and how to make its arguments.
    """

    network: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    model: Model


class Refusal(NamedTuple):
    """Where google-parallax stops.

    Attributes:
      primitive: of the equation that it does not know; empty where it stops elsewhere.
      words: what it says.
    """

    primitive: str
    words: str


Specs = dict[tuple[str, ...], tuple[tuple[int, ...], P]]
"""Shape and `PartitionSpec` of each parameter by its path."""


def _text_model(make: Callable[..., Model], network: Any, batch: int, sizes: dict[str, Any]) -> Rival:
    tokens = jax.ShapeDtypeStruct((batch, sizes["sequence"]), jnp.int32)
    return Rival(network, (tokens,), make(batch=batch, **sizes))


def _gpt(batch: int, **sizes: Any) -> Rival:
    return _text_model(gpt_nnx.make, lambda: gpt_nnx.GPT(gpt.Sizes(**sizes), nnx.Rngs(0)), batch, sizes)


def _decoder(batch: int, **sizes: Any) -> Rival:
    return _text_model(decoder.make, decoder.Decoder(decoder.Sizes(**sizes)), batch, sizes)


def _moe(batch: int, **sizes: Any) -> Rival:
    network = decoder.Decoder(decoder.Sizes(**sizes), block=moe._DecoderBlock)
    return _text_model(moe.make_decoder, network, batch, sizes)


def _mixer(batch: int, **sizes: Any) -> Rival:
    image = jax.ShapeDtypeStruct((batch, sizes["patches"], sizes["pixels"]), jnp.float32)
    network = mixer.Mixer(sizes["layers"], sizes["width"], sizes["classes"])
    return Rival(network, (image,), mixer.make(batch=batch, **sizes))


def _vision_transformer(batch: int, **sizes: Any) -> Rival:
    image = jax.ShapeDtypeStruct((batch, sizes["image"], sizes["image"], vision_transformer.CHANNELS), jnp.float32)
    names = ("layers", "width", "heads", "hidden", "patch", "classes")
    network = vision_transformer.VisionTransformer(*(sizes[name] for name in names))
    return Rival(network, (image,), vision_transformer.make(batch=batch, **sizes))


MODELS: dict[str, tuple[Callable[..., Rival], dict[str, Any], dict[str, Any]]] = {
    "gpt": (_gpt, {"batch": 16, "layers": 2, "width": 2048, "heads": 16, **_TEXT}, {"batch": 8, **_SMALL_TEXT}),
    "mixer": (
        _mixer,
        {"batch": 512, "layers": 4, "width": 1024, "patches": 196, "pixels": 768, "classes": 1000},
        {"batch": 8, "layers": 1, "width": 32, "patches": 16, "pixels": 4, "classes": 10},
    ),
    "decoder": (
        _decoder,
        {"batch": 16, "hidden": 8192, **_DECODER},
        {"batch": 8, "key_value_heads": 4, "hidden": 128, **_SMALL_TEXT},
    ),
    "mixture of experts": (_moe, {"batch": 16, **_DECODER}, {"batch": 8, "key_value_heads": 4, **_SMALL_TEXT}),
    "vision transformer": (
        _vision_transformer,
        {
            "batch": 128, "layers": 2, "width": 1408, "heads": 16, "hidden": 6144, "patch": 14, "image": 224,
            "classes": 1000,
        },
        {"batch": 8, "layers": 1, "width": 24, "heads": 2, "hidden": 40, "patch": 4, "image": 16, "classes": 10},
    ),
}  # fmt: skip
"""How each model is made, at the size of the table and at that of tests."""


@contextmanager
def without_remat() -> Iterator[None]:
    """Makes Linen modules inside keep all residuals: `nn.remat` returns the module as it is."""
    with patch.object(linen, "remat", lambda module, *args, **kwargs: module):
        yield


def specs_of(rival: Rival, strategy: str, mesh: Mesh) -> Specs | Refusal:
    """Returns how google-parallax splits each parameter, or where it stops.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    parallax: Any = importlib.import_module("parallax")

    def sharded(*inputs: Any) -> Any:
        chosen = parallax.ShardingStrategy[strategy]
        model = parallax.create_sharded_model(rival.network, inputs, strategy=chosen)
        return nnx.state(model) if isinstance(model, nnx.Module) else model

    axes = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=axes)
    with jax.sharding.use_abstract_mesh(explicit):
        try:
            is_linen = isinstance(rival.network, linen.Module)
            state = jax.eval_shape(sharded, *rival.inputs) if is_linen else _nnx_state(sharded, rival.inputs)
        except Exception as error:  # its own assertions, and those of JAX about what it returns
            return _refusal(error)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_words(path): (leaf.shape, leaf.sharding.spec) for path, leaf in leaves}


def _nnx_state(sharded: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    return nnx.eval_shape(lambda: sharded(*inputs))


def _refusal(error: Exception) -> Refusal:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "parallax" in Path(frame.filename).parts]
    own = [frame.name for frame in frames if frame.filename != __file__]
    equation = error.args[0] if error.args else None
    equation = equation[0] if isinstance(equation, tuple) else equation
    primitive = str(getattr(equation, "primitive", ""))
    text = f"the operation {primitive}" if primitive else f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return Refusal(primitive, f"stops in `{own[-1] if own else 'jax'}` at {text}")


def hand_plan(specs: Specs, batch_spec: P, model: Model, mesh: Mesh) -> HandPlan:
    """Returns the whole plan: the optimizer's arrays are split as their parameters."""

    def sharding(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        words = _words(path)
        found = (spec for name, (shape, spec) in specs.items() if words[-len(name) :] == name and shape == leaf.shape)
        return NamedSharding(mesh, next(found, P()))

    state, batch = abstract_arguments(model)
    return HandPlan(
        jax.tree_util.tree_map_with_path(sharding, state),
        jax.tree.map(lambda _: NamedSharding(mesh, batch_spec), batch),
        {},
    )


def _words(path: Any) -> tuple[str, ...]:
    """Returns a leaf's path as words, without Linen's name of the collection of parameters."""
    words = tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
    return words[1:] if words[0] == "params" else words


def _share_split(specs: Specs) -> str:
    sizes = {name: math.prod(shape) for name, (shape, _) in specs.items()}
    split = sum(size for name, size in sizes.items() if any(axis is not None for axis in specs[name][1]))
    return f"takes it, and splits {split / sum(sizes.values()):.0%} of the parameters"


class Answer(NamedTuple):
    """The answer of a strategy for a model.

    Attributes:
      model: its name.
      strategy: its name.
      words: whether the strategy takes the model, or where it stops.
      plan: None where it stops.
      is_stopped_by_remat: whether it stops at `jax.checkpoint`.
    """

    model: str
    strategy: str
    words: str
    plan: HandPlan | None
    is_stopped_by_remat: bool = False


def answers_of(name: str, rival: Rival, mesh: Mesh) -> list[Answer]:
    """Returns the answer of each strategy for a model."""
    answers = []
    for strategy, batch_spec in STRATEGIES.items():
        specs = specs_of(rival, strategy, mesh)
        if isinstance(specs, Refusal):
            answers.append(Answer(name, strategy, specs.words, None, "remat" in specs.primitive))
        else:
            plan = hand_plan(specs, batch_spec, rival.model, mesh)
            answers.append(Answer(name, strategy, _share_split(specs), plan))
    return answers


def rows_of(answers: Sequence[Answer], setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the times of the found plan and of those of google-parallax; keeps them where a file is given."""
    plans = {FOUND: None} | {f"parallax {a.strategy}": a.plan for a in answers if a.plan is not None}
    for plan_name, plan in plans.items():
        try:
            row, _ = time_plan(setting, plan_name, options.time_limit, plan)
        except jax.errors.JaxRuntimeError as error:
            print(f"{setting.name}  {plan_name} is not compiled by XLA: {str(error).splitlines()[0]}", flush=True)
            continue
        print(setting.name, *cells(row), f"+{row.compile_s:.0f} s", sep="  ", flush=True)
        if options.output:
            append_row(row, options.output)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what google-parallax takes, and the times of compiled programs; 1 if it is not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mesh", default="4x2", help="data x model; 4x2 is what `parallax.auto_mesh` makes of 8")
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--target", choices=MESHES, default="h100", help="what the programs are compiled for")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    parser.add_argument("--shardings-only", action="store_true", help="compiles nothing")
    parser.add_argument("-o", "--output", type=Path, help="also add each row to this file")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("parallax") is None:
        print(NOT_INSTALLED, file=sys.stderr)
        return 1
    mesh = MESHES[options.target](parse_mesh(options.mesh))
    answers: list[Answer] = []
    rows: list[Row] = []
    for name in options.models:
        make, full, small = MODELS[name]
        rival = make(**(full if options.sizes == "full" else small))
        setting = Setting(name, rival.inputs[0].shape[0], rival.model, mesh, HARDWARE["datasheet"](mesh))
        own = answers_of(name, rival, mesh)
        answers += own
        if not options.shardings_only:
            rows += rows_of(own, setting, options)
        if own[0].is_stopped_by_remat:
            with without_remat():
                own = answers_of(f"{name}, no remat", rival, mesh)
                answers += own
                if own[0].plan is not None and not options.shardings_only:
                    rows += rows_of(own, setting._replace(name=own[0].model), options)
    title = f"What google-parallax says to models on {options.mesh}"
    print_table(title, ("model", "strategy", ""), [answer[:3] for answer in answers])
    print_table(f"Steps on {options.mesh}, compiled for {options.target}", COLUMNS, _cells(rows))
    return 0


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Formats rows, with times over that of the found plan of the same model."""
    found_s = {row.model: row.timeline_s for row in rows if row.plan == FOUND}
    return [
        (
            row.model, row.plan, f"{1e3 * row.timeline_s:.1f}", f"{row.timeline_s / found_s[row.model]:.2f}",
            f"{1e3 * row.busy_s.get(COMPUTE, 0.0):.1f}", f"{1e3 * sum(row.waited_s.values()):.1f}",
            f"{row.sent_bytes[1] / 1e9:.2f}", f"{row.peak_bytes[1] / 2**30:.1f}" if row.peak_bytes else "",
        )
        for row in rows
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
