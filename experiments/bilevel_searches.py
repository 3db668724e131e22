"""Bilevel searches of a space of communication, each with training from the start: proposals and their validation runs.

Beside those with the slopes that are predicted there are two controls: slopes of the loss that are shuffled over lossy
strategies, and slopes that are cut, so that A follows the cost alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diffshard
from cost.evaluation import evaluate
from diffshard.bilevel_search.base import BilevelState, Increase, TrainingProgress
from diffshard.bilevel_search.search import curvature
from experiments import bilevel_training as task
from search_spaces.base import Batch, Choice, LossySpace, Params, RelaxedChoice
from search_spaces.communication.space import CommunicationSpace

MARGIN = 0.005
"""Nats that a choice may cost and still counts as not inferior; also the bound that searches are given."""
CHOICE_OPTIMIZER = optax.adam(0.1)
_VALIDATION_SEED = 100  # of no row


class Run(NamedTuple):
    """The result of a method for one seed: a choice, and the share of training that is exact before it."""

    choice: Choice
    exact_share: float = 0.0


def cut(
    space: LossySpace, params: Params, batch: Batch, relaxed: RelaxedChoice, key: jax.Array, progress: TrainingProgress
) -> jax.Array:
    """Estimates no increase, which has no slope: A follows the cost alone."""
    del space, params, batch, relaxed, key, progress
    return jnp.zeros(())


def shuffled(inner: Increase, where: CommunicationSpace, seed: int) -> Increase:
    """Returns an estimator whose slopes over the exact strategy's are exchanged at random among lossy strategies."""
    is_exact = [np.asarray(group.exact) for group in where.groups]
    lossy = np.flatnonzero(~np.concatenate(is_exact))
    order = lossy[np.random.default_rng(seed).permutation(len(lossy))]
    ends = np.cumsum([len(row) for row in is_exact])[:-1]

    def increase(
        space: LossySpace,
        params: Params,
        batch: Batch,
        relaxed: RelaxedChoice,
        key: jax.Array,
        progress: TrainingProgress,
    ) -> jax.Array:
        value, slopes = jax.value_and_grad(lambda p: inner(space, params, batch, p, key, progress))(list(relaxed))
        over = jnp.concatenate([slope - slope[int(row.argmax())] for slope, row in zip(slopes, is_exact, strict=True)])
        exchanged = jnp.split(over.at[lossy].set(over[order]), ends)
        moves = [weights - jax.lax.stop_gradient(weights) for weights in relaxed]
        linear = sum((m @ jax.lax.stop_gradient(s) for m, s in zip(moves, exchanged, strict=True)), jnp.zeros(()))
        return jax.lax.stop_gradient(value) + linear

    return increase


class Searches:
    """Bilevel searches in the space of one link speed, each with training from the start.

    They are named for their slopes: "curvature", "curvature shuffled" or "cut".
    """

    def __init__(self, training: task.Training, link: str):
        self.training, self.link = training, link
        self.space = task.space(training.setting, link, training.task)
        self._search_of: dict[str, diffshard.formats.BilevelSearch] = {}

    def proposals(self, name: str, seeds: int) -> list[Run]:
        """Returns the proposal for each seed, from the records where it is there."""

        def propose(seed: int) -> Choice:
            return self.search(name).finish(self.state_after(name, seed))[0].choice

        stem = f"search-{self.training.setting.name}-{self.link}-{name.replace(' ', '-')}-{self.training.steps}"
        records = self.training.records
        return [
            Run(tuple(task.with_record(records, f"{stem}-{seed}", lambda seed=seed: propose(seed))))
            for seed in range(seeds)
        ]

    def search(self, name: str) -> diffshard.formats.BilevelSearch:
        """Returns a search of the cheapest choice within the margin; made and compiled once."""
        if name not in self._search_of:
            estimator = {
                "curvature": curvature, "curvature shuffled": shuffled(curvature, self.space, seed=0), "cut": cut
            }[name]  # fmt: skip
            self._search_of[name] = diffshard.bilevel(
                None,
                space=self.space,
                weights_optimizer=self.training.optimizer,
                choice_optimizer=CHOICE_OPTIMIZER,
                max_loss_increase=MARGIN,
                estimator=estimator,
            )
        return self._search_of[name]

    def state_after(self, name: str, seed: int) -> BilevelState:
        """Returns the state after all steps of a seed."""
        search = self.search(name)
        train, validation = (task.as_list(self.training.batches(seed, name)) for name in ("train", "search"))
        state = search.init(jax.random.key(seed), self.training.params(seed), train[0])
        for train_batch, val_batch in zip(train, validation, strict=True):
            state, _ = search.update(state, train_batch, val_batch)
        return state

    def validate(self, name: str) -> dict[str, tuple[Run, int]]:
        """Searches with a seed of its own and validates; returns the runs by method, and the steps taken."""
        training = self.training

        def run() -> dict[str, tuple[Run, int]]:
            rungs = (training.steps // 4, training.steps // 4, training.steps // 2)
            data = diffshard.formats.CandidatesData(
                training.params(_VALIDATION_SEED),
                task.as_list(training.batches(_VALIDATION_SEED)),
                task.as_list(training.task.evaluated("validation")),
                jax.random.key(_VALIDATION_SEED),
                rungs=rungs,
                num_repeats=training.setting.repeats,
            )
            validation = self.search(name).validate(self.state_after(name, _VALIDATION_SEED), data)
            print(validation, flush=True)
            by_type = [t for t in validation.table if self._is_by_kind(t.choice) and not t.exact_share]
            exact_first = [candidate for candidate in validation.table if candidate.exact_share]
            first = {"winner": [validation.winner], "best by kind": by_type, "best exact first": exact_first}
            return {
                method: (Run(candidates[0].choice, candidates[0].exact_share), validation.steps + training.steps)
                for method, candidates in first.items()
                if candidates
            }

        stem = f"validation-{training.setting.name}-{self.link}-{name.replace(' ', '-')}-{training.steps}"
        runs_by_method = task.with_record(training.records, stem, run)
        return {method: (Run(tuple(run[0]), run[1]), steps) for method, (run, steps) in runs_by_method.items()}

    def _is_by_kind(self, choice: Choice) -> bool:
        """Tells whether all groups that choose from the same names take the same one."""
        strategy_of: dict[tuple[str, ...], int] = {}
        return all(strategy_of.setdefault(self.space.strategy_names(g), s) == s for g, s in enumerate(choice))

    def seconds(self, run: Run) -> float:
        """Returns mean communication of a step over the whole training."""
        exact, lossy = (evaluate(self.space.problem, choice).cost for choice in (self.space.exact_choice(), run.choice))
        return run.exact_share * exact + (1 - run.exact_share) * lossy
