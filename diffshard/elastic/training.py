"""A training that can be interrupted: its planned step, its state, and its checkpoints."""

import functools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost.real_numbers import Count, checked_number
from diffshard.elastic.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    SavedArray,
    remove,
    saved_steps,
    step_folder,
    write_manifest,
)
from diffshard.elastic.orbax_files import ArrayFiles
from diffshard.elastic.ownership import Ownership
from diffshard.pipelines.pipelined_function import PipelinedFunction
from diffshard.pipelines.plan import PipelinePlan
from diffshard.plans.printing import short_name
from diffshard.processes import errors_for_all, processes_of
from diffshard.sharding_search.call import abstract_array, array_paths, split
from diffshard.sharding_search.carried import Carried, placed_residuals, residual_key
from diffshard.sharding_search.numbers_check import as_one_array
from diffshard.sharding_search.placing_arrays import FreshState
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction

PlanT = TypeVar("PlanT", Plan, PipelinePlan)
STATE = "state"
"""What the state is called in checkpoints and messages, whatever the function calls its argument."""
_RESIDUAL = "residuals of operation "
"""What the arrays of `formats.Carried.residuals` are called in checkpoints, before their keys."""


class Training(Generic[PlanT]):
    """A planned training step with checkpoints; made by `diffshard.resume`. It is told what is saved, and so mutable.

    As a context manager it waits at its end until the last checkpoint is written.

    Attributes:
      step: the training step, as `diffshard.search` returns it.
      plan: how it runs on the mesh.
      num_steps: that the state of `restore` has made; 0 at the first start.
      data: what was saved beside this state; None at the first start.
    """

    def __init__(
        self,
        step: PlannedFunction[Plan] | PipelinedFunction[PipelinePlan],
        plan: PlanT,
        shardings: Sequence[NamedSharding],
        mesh: Mesh,
        fresh_state: FreshState,
        checkpoint: Checkpoint | None,
        directory: str,
        ownership: Ownership | None,
        save_interval_steps: int,
        max_to_keep: int,
    ):
        self.step, self.plan = step, plan
        self._shardings, self._mesh = shardings, mesh
        self.num_steps = 0 if checkpoint is None else checkpoint.num_steps
        self.data = None if checkpoint is None else checkpoint.data
        self._fresh_state, self._checkpoint = fresh_state, checkpoint
        self._saved = saved_arrays(fresh_state.paths(STATE), fresh_state.arrays)
        self._directory, self._ownership = directory, ownership
        self._save_interval_steps, self._max_to_keep = save_interval_steps, max_to_keep
        self._is_closed = False
        self._last_saved, self._num_overflows = self.num_steps, 0
        self._files = ArrayFiles()

    def restore(self) -> Any:
        """Returns the state to go on from: that of the checkpoint, or a new one at the first start.

        Each process reads only the parts that its devices hold, and a new state is computed in such parts, too. The
        training does not keep the state.

        Raises:
          OSError: the checkpoint cannot be read.
        """
        fresh, shardings = self._fresh_state, self._shardings
        if self._checkpoint is None:
            return self._with_residuals(fresh.make(shardings), {})
        targets = {
            saved.path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for saved, array, sharding in zip(self._saved, fresh.arrays, shardings, strict=True)
        }
        saved = self._checkpoint.residuals
        targets |= {_RESIDUAL + array.path: self._residual_target(array) for array in saved}
        restored = self._files.restore(self._checkpoint.folder, targets)
        num_arrays = len(fresh.arrays)
        residuals = {array.path: own for array, own in zip(saved, restored[num_arrays:], strict=True)}
        return self._with_residuals(fresh.structure.unflatten(restored[:num_arrays]), residuals)

    def _residual_target(self, array: SavedArray) -> jax.ShapeDtypeStruct:
        """Returns where residuals are read to: as the plan has them, or whole where it divides them otherwise."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        for tensor in self.plan.residuals if isinstance(self.plan, Plan) else ():
            if (residual_key(tensor), tensor.shape) == (array.path, array.shape):
                sharding = tensor.sharding_on(self._mesh)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def _with_residuals(self, state: Any, residuals: Mapping[str, Any]) -> Any:
        """Returns a state as the plan's step takes it."""
        if not isinstance(self.plan, Plan) or not (self.plan.residuals or residuals):
            return state
        placed = placed_residuals(self.plan, self.plan.placed_mesh, residuals)
        if not placed:
            return state
        self._num_overflows = Carried(state, placed).overflows
        return Carried(state, placed)

    def save(self, num_steps: int, state: Any, data: Any = None, *, force: bool = False) -> bool:
        """Begins a checkpoint if `save_interval_steps` divides the number of steps; returns whether it does.

        With `force` the number of steps may be any, for the last step and for a job that is told to stop. Where there
        is a checkpoint of this number of steps already, `force` does nothing, and False is returned.

        The state is copied off the devices before this returns, so that the next step may use its memory, and written
        in the background. The oldest checkpoints beyond `max_to_keep` are removed when a newer one is whole. Where
        several processes train, all of them call this with the same `num_steps` and `force`.

        Args:
          num_steps: that the state has made; larger than at the last checkpoint, or with `force` the same.
          state: the first argument of the next step.
          data: JSON values to be kept beside the state, such as the position in the training data. They may be changed
            when this has returned.
          force: whether to save between intervals, too.

        Raises:
          ValueError: the number is not larger than the last one, the data are not JSON values, the state has other
            arrays than the first one, or it lacks the residuals that the plan carries.
          CheckpointError: another job has taken the directory, or there is a folder of the user's in the way.
          OSError: the checkpoint before could not be written, as on a full disk.
          ProcessesError: one of these happened in another process, or it saves another number of steps.
        """
        with errors_for_all(self._mesh, "save a checkpoint"):
            if self._is_closed:
                raise ValueError("`save` cannot be called after `close`: the directory was given back.")
            num_steps = checked_number("num_steps", num_steps, Count)
            if (num_steps == self._last_saved) if force else (num_steps % self._save_interval_steps):
                return False
            what, facts = "save a checkpoint", {"`num_steps`": str(num_steps)}
            state, residuals = self._parts_of(state)
            data, named = processes_of(self._mesh).alike(
                what, lambda: self._checked(num_steps, state, data), lambda _: facts
            )
            named |= {_RESIDUAL + key: array for key, array in residuals.items()}
            self.wait()
            entries = saved_arrays(tuple(residuals), [abstract_array(array) for array in residuals.values()])
            finish = functools.partial(
                write_manifest,
                plan=self.plan, num_steps=num_steps, arrays=self._saved, data=data, residuals=entries,
            )  # fmt: skip
            self._files.save(step_folder(self._directory, num_steps), named, finish)
            self._last_saved = num_steps
            return True

    def _parts_of(self, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Returns the state itself and what the plan's step carries besides; warns of new overflows in that."""
        if isinstance(state, Carried):
            self._warn_of_overflows(state.overflows)
            return state.state, state.residuals
        if isinstance(self.plan, Plan) and self.plan.residuals:
            raise ValueError(
                "The state to be saved has no residuals, which the plan's formats carry from step to step: they would "
                f"be lost. Save the `Carried` that the step takes and returns, not {type(state).__name__}."
            )
        return state, {}

    def _warn_of_overflows(self, count: int) -> None:
        if count > self._num_overflows:
            warnings.warn(
                f"{count - self._num_overflows} times since the last checkpoint an operand of a product had numbers "
                "that its delayed scale cut off.",
                stacklevel=4,
            )
        self._num_overflows = count

    def _checked(self, num_steps: int, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """Checks what is to be saved; returns a copy of the data, and the state's arrays by their paths."""
        if num_steps <= self._last_saved:
            raise ValueError(
                f"`num_steps` is {num_steps}, but there is a checkpoint of step {self._last_saved} already. Count all "
                "steps since the first start: begin with `training.num_steps`."
            )
        if not _has_only_text_as_keys(data):
            raise ValueError(f"`data` must be JSON values, whose dictionaries have text as keys, not {data!r}.")
        try:
            data = json.loads(json.dumps(data, allow_nan=False))  # a copy, as the checkpoint has it when it is read
        except (TypeError, ValueError) as error:
            raise ValueError(f"`data` must be JSON values, such as numbers and lists of them: {error}.") from None
        arrays, _ = split(state)
        saved = saved_arrays(array_paths(STATE, state), [abstract_array(array) for array in arrays])
        difference = difference_of("The state of `init`", self._saved, "the state to be saved", saved)
        if difference is not None:
            raise ValueError(f"{difference} Save what the step takes as its first argument.")
        if self._ownership is not None:
            self._ownership.check()
            if os.path.lexists(folder := step_folder(self._directory, num_steps)):
                raise CheckpointError(f"`{folder}` is in the way of a checkpoint, and none itself: move it elsewhere.")
        return data, {entry.path: as_one_array(array) for entry, array in zip(saved, arrays, strict=True)}

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and removes the oldest.

        Raises:
          OSError: the last checkpoint could not be written, as on a full disk; those before it are as they were.
        """
        self._files.wait()
        if self._ownership is not None and not self._ownership.is_lost:
            for num_steps in saved_steps(self._directory)[: -self._max_to_keep]:
                remove(self._directory, num_steps)

    def close(self) -> None:
        """Waits as `wait`, ends the threads that write, and gives the directory back; nothing can be saved then.

        Raises:
          OSError: the last checkpoint could not be written; the threads have ended and the directory is free all the
            same.
        """
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._files.close()
            if self._ownership is not None:
                self._ownership.release()

    def __enter__(self) -> "Training[PlanT]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Training {short_name(self.plan.function)} from step {self.num_steps} in `{self._directory}`>"


def difference_of(one: str, first: Sequence[SavedArray], other: str, second: Sequence[SavedArray]) -> str | None:
    """Returns a sentence about the first array that two states do not share; None if they have the same arrays."""
    for a, b in zip(first, second, strict=False):
        if a != b:
            return f"{one} has {a} where {other} has {b}."
    if len(first) == len(second):
        return None
    longer, which = (first, one) if len(first) > len(second) else (second, other)
    extra = longer[min(len(first), len(second))]
    return f"{one} has {len(first)} arrays and {other} {len(second)}: only {which[0].lower()}{which[1:]} has {extra}."


def saved_arrays(paths: Sequence[str], arrays: Sequence[jax.ShapeDtypeStruct]) -> tuple[SavedArray, ...]:
    """Returns arrays as a checkpoint has them."""
    return tuple(SavedArray(p, tuple(a.shape), str(a.dtype)) for p, a in zip(paths, arrays, strict=True))


def _has_only_text_as_keys(data: Any) -> bool:
    """Whether all keys in JSON values are text: others would come back as text from a file."""
    if isinstance(data, dict):
        return all(isinstance(key, str) and _has_only_text_as_keys(value) for key, value in data.items())
    return not isinstance(data, list | tuple) or all(map(_has_only_text_as_keys, data))
