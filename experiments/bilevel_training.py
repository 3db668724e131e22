"""Trainings of the bilevel experiments: settings, spaces, and losses after training with a choice, kept in records."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cost.base import Hardware, Link
from diffshard.bilevel_search.plans.training import TrainingState, gradients_of, next_state
from diffshard.files import write_whole
from experiments.bilevel_tasks import PARTS, Task, experts, gpt, images
from search_spaces.base import Choice
from search_spaces.communication.base import BFLOAT16, INT4, INT8, CollectiveStrategy, Precision
from search_spaces.communication.space import CommunicationSpace
from search_spaces.communication.strategies import Encode, ErrorFeedback, Exact, Schedule

MESH = {"data": 2, "model": 4}
BYTES_PER_S = {"slow": 1e9, "medium": 1e10, "fast": 1e11}
"""What a device sends around the ring of either axis."""
LATENCY_S = 1e-6
MEMORY_BYTES_PER_S = 2e12  # encoding is priced by its memory traffic
RATE = 3e-3  # of adam, falling by a cosine to a twentieth


@dataclass(frozen=True)
class Setting:
    """A training: its task, its steps, and the choices for it.

    Attributes:
      name: for records.
      task: makes the model and its data.
      steps: of a training.
      narrow: number formats beside the exact one; gradients in int4 are sent with error feedback.
      switch_shares: shares of training after which int8 may become int4, at cotangents and gradients.
      tie: whether operations of a type share a strategy.
      repeats: trainings of each candidate of `validate`.
    """

    name: str
    task: Callable[[], Task]
    steps: int
    narrow: tuple[Precision, ...] = (BFLOAT16, INT8, INT4)
    switch_shares: tuple[float, ...] = (0.5, 0.75)
    tie: Literal["type"] | None = None
    repeats: int = 1

    @property
    def uniform(self) -> tuple[str, ...]:
        """Names of what can be chosen everywhere."""
        return ("exact", *(precision.name for precision in self.narrow))

    @property
    def strategies(self) -> dict[str, tuple[CollectiveStrategy, ...]]:
        """By direction."""
        values = (Exact(), *(Encode(precision) for precision in self.narrow))
        gradients = (Exact(), *(ErrorFeedback(p) if p == INT4 else Encode(p) for p in self.narrow))
        switches = [round(share * self.steps) for share in self.switch_shares]
        return {
            "forward": values,
            "backward": values + tuple(Schedule(Encode(INT8), Encode(INT4), at, self.steps) for at in switches),
            "gradient": gradients
            + tuple(Schedule(Encode(INT8), ErrorFeedback(INT4), at, self.steps) for at in switches),
        }

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Of parameters, in training and in searches alike."""
        return optax.adam(optax.cosine_decay_schedule(RATE, self.steps, 0.05))


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("gpt", gpt, 1000),
        Setting("experts", experts, 600, tie="type", repeats=3),
        Setting("images", images, 600, repeats=3),
    )
}
QUICK = Setting("quick", lambda: gpt(1, 16, 4, 16), 8, (INT4,), ())


class Losses(NamedTuple):
    """After a training, in nats: on data that choices are selected by, and on data that nothing is selected by."""

    validation: float
    test: float


def hardware(link: str) -> Hardware:
    """Returns devices with links of a speed in `BYTES_PER_S`; only communication and encoding count."""
    return Hardware(
        f"{link} links", 1e15, MEMORY_BYTES_PER_S, np.inf, {a: Link(LATENCY_S, 1 / BYTES_PER_S[link]) for a in MESH}
    )


def space(setting: Setting, link: str, task: Task | None = None) -> CommunicationSpace:
    """Returns the choices at the collectives of the model's training step."""
    task = task or setting.task()
    params = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), task.evaluated("test"))
    return CommunicationSpace(
        task.loss, MESH, params, batch, task.param_specs, task.batch_specs,
        strategies=setting.strategies, tie=setting.tie, hardware=hardware(link),
    )  # fmt: skip


def uniform(where: CommunicationSpace, precision: str) -> Choice:
    """Chooses one precision everywhere; int4 gradients with error feedback, the first of the user's alternatives."""
    names = [where.strategy_names(g) for g in range(len(where.node_names))]
    return tuple(next((s for s, name in enumerate(row) if name.startswith(precision)), 0) for row in names)


def describe(where: CommunicationSpace, choice: Choice) -> str:
    """Returns a choice in one short line: its strategies in the order of the space's groups."""
    return " ".join(_short(where.strategy_names(g)[s]) for g, s in enumerate(choice))


def batches(task: Task, name: str, seed: int, count: int) -> Any:
    """Returns random batches of a part, `[count, ...]`; the same seed gives the same."""
    return task.draw(name, jax.random.fold_in(jax.random.key(seed), PARTS.index(name)), count)


def as_list(batches: Any) -> list[Any]:
    """Returns batches `[count, ...]` one by one."""
    return [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(len(jax.tree.leaves(batches)[0]))]


class Training:
    """Trainings from the start with a choice, or exactly at first and with the choice in the rest; all compiled once.

    A seed fixes initial parameters, batches and noise, so that trainings of one seed are paired.

    Args:
      setting: what is trained.
      records: a folder where losses are kept and taken up from, or None.
    """

    def __init__(self, setting: Setting, records: Path | None):
        self.setting, self.records, self.steps = setting, records, setting.steps
        self.task = setting.task()
        self.space = space(setting, "medium", self.task)
        self.optimizer = setting.optimizer

    def losses(self, seed: int, choice: Choice, exact_share: float = 0.0) -> Losses:
        """Returns losses after a training; a schedule's share of exact training is 0 or one half."""
        name = f"training-{self.setting.name}-{self.steps}-{seed}-{'.'.join(map(str, choice))}-{exact_share:g}"
        return Losses(*with_record(self.records, name, lambda: self._run(seed, choice, exact_share)))

    def params(self, seed: int) -> Any:
        """Returns a seed's initial parameters."""
        return self.task.init(jax.random.key(1000 + seed))

    def batches(self, seed: int, name: str = "train") -> Any:
        """Returns a seed's batches of a part, one for each step."""
        return batches(self.task, name, seed, self.steps)

    def losses_after_exact(self, seed: int, choices: Sequence[Choice]) -> list[Losses]:
        """Returns losses with choices that are met only after an exact training."""
        name = f"met-{self.setting.name}-{self.steps}-{seed}"

        def meet() -> list[Losses]:
            params = self._train(seed, tuple(self.space.exact_choice()), 0.0)
            return [self._test(params, choice) for choice in choices]

        return [Losses(*losses) for losses in with_record(self.records, name, meet)]

    def _run(self, seed: int, choice: Choice, exact_share: float) -> Losses:
        return self._test(self._train(seed, choice, exact_share), choice)

    def _train(self, seed: int, choice: Choice, exact_share: float) -> Any:
        params, half = self.params(seed), self.steps // 2
        state = TrainingState(
            params, self.optimizer.init(params), self.space.init_residuals(params), jax.random.key(seed), jnp.int32(0)
        )
        data = self.batches(seed)
        first = tuple(self.space.exact_choice()) if exact_share else choice
        for begin, part_choice in ((0, first), (half, choice)):
            part = jax.tree.map(lambda x, begin=begin: x[begin : begin + half], data)
            state = self._steps(_traced(part_choice), state, part)
        return state.params

    def _test(self, params: Any, choice: Choice) -> Losses:
        return Losses(*(float(self._loss(_traced(choice), params, batches)) for batches in self._evaluated))

    @cached_property
    def _evaluated(self) -> tuple[Any, Any]:
        return self.task.evaluated("validation"), self.task.evaluated("test")

    @cached_property
    def _steps(self) -> Callable[..., TrainingState]:
        def step(choice: Any, state: TrainingState, batch: Any) -> tuple[TrainingState, None]:
            return next_state(self.optimizer, state, gradients_of(self.space, state, batch, choice)), None

        return jax.jit(lambda choice, state, data: jax.lax.scan(partial(step, choice), state, data)[0])

    @cached_property
    def _loss(self) -> Callable[..., jax.Array]:
        def loss(choice: Any, params: Any, batches: Any) -> jax.Array:
            key, last = jax.random.key(0), self.steps
            return jax.lax.map(lambda batch: self.space.loss(params, batch, choice, key, last), batches).mean()

        return jax.jit(loss)


def with_record(records: Path | None, name: str, make: Callable[[], Any]) -> Any:
    """Returns the result of `make`, in JSON's terms, from the records where it is there already."""
    path = records and records / f"{name}.json"
    if path and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    record = make()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record))
    return record


def _short(name: str) -> str:
    for long, short in (("exact", "f32"), ("bfloat16", "b16"), ("int", "i"), (" with error feedback", "e")):
        name = name.replace(long, short)
    first, _, later = name.partition(", ")
    return f"{first}>{later.replace(' from step ', '@')}" if later else first


def _traced(choice: Sequence[int]) -> list[jax.Array]:
    return [jnp.int32(strategy) for strategy in choice]
