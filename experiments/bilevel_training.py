"""What the bilevel experiments train: a byte GPT on 2 x 2 emulated devices, on disjoint parts of a text."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.hardware import Hardware, Link
from diffshard.bilevel.plan import Choice
from diffshard.files import write_whole
from experiments.models import device_gpt, text
from search_spaces.communication.precision import BFLOAT16, INT4, INT8, Precision
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, Exact, Strategy

MESH = {"data": 2, "model": 2}
BYTES_PER_S = {"slow": 1e9, "medium": 1e10, "fast": 1e11}
"""What a device sends around the ring of either axis."""
LATENCY_S = 1e-6
MEMORY_BYTES_PER_S = 2e12  # encoding is priced by its memory traffic
BATCH = 8
OPTIMIZER = optax.adam(3e-3)

_SHARES = {"train": (0.0, 0.61), "search": (0.61, 0.74), "validation": (0.74, 0.87), "test": (0.87, 1.0)}
_EVALUATED = 4  # batches


@dataclass(frozen=True)
class Setting:
    """What is trained, and what is chosen from.

    Attributes:
      name: for records.
      sizes: of the model.
      narrow: number formats beside the exact one; gradients in int4 are sent with error feedback.
    """

    name: str
    sizes: device_gpt.DeviceSizes
    narrow: tuple[Precision, ...]

    @property
    def uniform(self) -> tuple[str, ...]:
        """Names of what can be chosen everywhere."""
        return ("exact", *(precision.name for precision in self.narrow))

    @property
    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """By direction."""
        values = (Exact(), *(Encode(precision) for precision in self.narrow))
        gradients = (Exact(), *(ErrorFeedback(p) if p == INT4 else Encode(p) for p in self.narrow))
        return {"forward": values, "backward": values, "gradient": gradients}


FULL = Setting("full", device_gpt.DeviceSizes(), (BFLOAT16, INT8, INT4))
QUICK = Setting("quick", device_gpt.DeviceSizes(layers=1, width=16, heads=2, sequence=16), (INT4,))


class Losses(NamedTuple):
    """After a training, in nats: on text that choices are selected by, and on text that nothing is selected by."""

    validation: float
    test: float


def hardware(link: str) -> Hardware:
    """Devices with links of a speed in `BYTES_PER_S`; only communication and encoding count."""
    return Hardware(
        f"{link} links", 1e15, MEMORY_BYTES_PER_S, np.inf, {a: Link(LATENCY_S, 1 / BYTES_PER_S[link]) for a in MESH}
    )


def space(setting: Setting, link: str) -> CommunicationSpace:
    """The choices at the collectives of the model's training step."""
    sizes = setting.sizes
    params = jax.eval_shape(lambda: device_gpt.init(jax.random.key(0), sizes))
    tokens = jax.ShapeDtypeStruct((BATCH, sizes.sequence + 1), jnp.int32)
    specs = device_gpt.SPECS, device_gpt.BATCH_SPEC
    return CommunicationSpace(
        device_gpt.loss_fn, MESH, params, tokens, *specs, strategies=setting.strategies, hardware=hardware(link)
    )


def uniform(where: CommunicationSpace, precision: str) -> Choice:
    """One precision everywhere; int4 gradients with error feedback."""
    names = [where.names(g) for g in range(len(where.groups))]
    return tuple(next(s for s, name in enumerate(row) if name.startswith(precision)) for row in names)


def described(where: CommunicationSpace, choice: Choice) -> str:
    """A choice in one short line: its strategies in the order of the space's groups."""
    short = {"exact": "f32", "bfloat16": "bf16", "int4 with error feedback": "int4ef"}
    names = [where.names(g)[s] for g, s in enumerate(choice)]
    return " ".join(short.get(name, name) for name in names)


def part(name: str) -> np.ndarray:
    """One of the disjoint parts of the text: train, search, validation or test."""
    tokens = text.load()
    begin, end = (int(share * len(tokens)) for share in _SHARES[name])
    return tokens[begin:end]


def batches(name: str, seed: int, count: int, sizes: device_gpt.DeviceSizes) -> jax.Array:
    """Random windows of a part, `[count, batch, sequence + 1]`; the same seed gives the same."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), list(_SHARES).index(name)), count)
    tokens = part(name)
    return jnp.stack([text.sample(tokens, key, BATCH, sizes.sequence) for key in keys])


def evaluated(name: str, sizes: device_gpt.DeviceSizes) -> jax.Array:
    """Evenly spaced windows of a part, `[batches, batch, sequence + 1]`."""
    tokens = part(name)
    starts = np.linspace(0, len(tokens) - sizes.sequence - 1, _EVALUATED * BATCH).astype(int)
    return jnp.asarray(tokens[starts[:, None] + np.arange(sizes.sequence + 1)]).reshape(_EVALUATED, BATCH, -1)


class Training:
    """Trainings from the start with a choice, or exactly at first and with the choice in the rest; all compiled once.

    A seed fixes initial parameters, batches and noise, so that trainings of one seed are paired.

    Args:
      setting: what is trained.
      steps: of a training, an even number.
      records: a folder where losses are kept and taken up from, or None.
    """

    def __init__(self, setting: Setting, steps: int, records: Path | None):
        self.setting, self.steps, self.records = setting, steps, records
        self.sizes = setting.sizes
        self.space = space(setting, "medium")

    def losses(self, seed: int, choice: Choice, exact_share: float = 0.0) -> Losses:
        """After a training; a schedule's share of exact training is 0 or one half."""
        name = f"training-{self.setting.name}-{self.steps}-{seed}-{'.'.join(map(str, choice))}-{exact_share:g}"
        return Losses(*recorded(self.records, name, lambda: self._run(seed, choice, exact_share)))

    def params(self, seed: int) -> Any:
        """A seed's initial parameters."""
        return device_gpt.init(jax.random.key(1000 + seed), self.sizes)

    def batches(self, seed: int) -> jax.Array:
        """A seed's batches, one for each step."""
        return batches("train", seed, self.steps, self.sizes)

    def _run(self, seed: int, choice: Choice, exact_share: float) -> Losses:
        params, half = self.params(seed), self.steps // 2
        carried = params, OPTIMIZER.init(params), self.space.state(params)
        data, key = self.batches(seed), jax.random.key(seed)
        first = tuple(self.space.lossless_choice()) if exact_share else choice
        for begin, running in ((0, first), (half, choice)):
            carried = self._steps(_traced(running), carried, data[begin : begin + half], jnp.int32(begin), key)
        tests = [self._loss(_traced(choice), carried[0], windows) for windows in self._evaluated]
        return Losses(*(float(loss) for loss in tests))

    @cached_property
    def _evaluated(self) -> tuple[jax.Array, jax.Array]:
        return evaluated("validation", self.sizes), evaluated("test", self.sizes)

    @cached_property
    def _steps(self) -> Callable[..., Any]:
        def step(choice: Any, key: jax.Array, carried: Any, at: Any) -> tuple[Any, None]:
            (params, weights_state, residuals), (number, batch) = carried, at
            _, gradients, residuals = self.space.loss_and_gradients(
                params, batch, choice, residuals, jax.random.fold_in(key, number), number
            )
            updates, weights_state = OPTIMIZER.update(gradients, weights_state, params)
            return (optax.apply_updates(params, updates), weights_state, residuals), None

        def steps(choice: Any, carried: Any, data: jax.Array, begin: jax.Array, key: jax.Array) -> Any:
            numbers = begin + jnp.arange(len(data))
            return jax.lax.scan(lambda c, at: step(choice, key, c, at), carried, (numbers, data))[0]

        return jax.jit(steps)

    @cached_property
    def _loss(self) -> Callable[..., jax.Array]:
        def loss(choice: Any, params: Any, windows: jax.Array) -> jax.Array:
            key = jax.random.key(0)
            return jax.lax.map(lambda batch: self.space.loss(params, batch, choice, key), windows).mean()

        return jax.jit(loss)


def recorded(records: Path | None, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, in JSON's terms, from the records where it is there already."""
    path = records and records / f"{name}.json"
    if path and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    found = make()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found))
    return found


def _traced(choice: Sequence[int]) -> list[jax.Array]:
    return [jnp.int32(strategy) for strategy in choice]
