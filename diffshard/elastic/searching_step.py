"""`search_while_training` runs a training step, measures it, and goes on searching for a better plan meanwhile.

The first plan may be one of a short search, so that training begins at once. `Replanner` decides; here are the clock,
the thread that searches and compiles in the background, and the moves of the state. Not measured are the first step of
a plan and steps that ran while the thread was at work.
"""

import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from cost.base import Hardware
from cost.real_numbers import Count, checked_number
from diffshard.checks.hlo import memory_plan
from diffshard.elastic.replanning import Event, Prices, Replanner
from diffshard.plans.base import PlanData
from diffshard.plans.printing import format_bytes, format_count, format_table, short_name
from diffshard.processes import processes_of
from diffshard.sharding_search.call import abstract_split, jax_settings
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.planned_function import PlannedFunction


class SearchingStep:
    """A training step whose plan is searched again while it runs; made by `search_while_training`. It is mutable.

    Attributes:
      num_steps: that were made.
    """

    def __init__(
        self,
        step: PlannedFunction[Plan],
        num_steps: int,
        window_steps: int,
        time_limit_s: float | None,
        clock: Callable[[], float],
    ):
        self.num_steps = 0
        self._first, self._total_steps, self._window_steps = step, num_steps, window_steps
        self._time_limit_s, self._clock = time_limit_s, clock
        self._begun: Replanner | None = None
        self._shapes: tuple[Any, ...] = ()
        self._searched: dict[int, PlannedFunction[Plan]] = {}  # by the identity of their plans
        self._compiled: dict[int, PlannedFunction[Plan]] = {}  # by the numbers of their plans
        self._compile_s, self._move_s = 0.0, 0.0  # of the last ones
        self._thread = ThreadPoolExecutor(1, "search while training")
        self._search: Future[int | None] | None = None
        self._proposal: int | None = None  # is tried when the plan that runs was measured again
        self._is_new = True  # the plan that runs has made no step yet
        self._has_moved = False  # the state is where another plan wanted it

    def __call__(self, *args: Any) -> Any:
        """Makes a step with the arguments of the planned one, the state first; waits for its results and returns them.

        Before it the state may be moved to a better plan; while it moves it is there twice.

        Raises:
          ValueError: JAX's settings are others than when the training began.
          TypeError, InfeasibleError: as the planned step.
        """
        replanner = self._begun or self._begin(args)
        self._take_found_plan(replanner)
        if self._has_moved:
            args = self._moved(args)
        is_measured = not self._is_new and self._search is None
        start_s = self._clock()
        result = jax.block_until_ready(self._compiled[replanner.current](*args))
        step_s, self._is_new = self._clock() - start_s, False
        self.num_steps += 1
        if not is_measured:
            replanner.restart_window()
        elif replanner.record(step_s, self.num_steps) and self._steps_left:
            self._decide(replanner)
        return result

    @property
    def plan(self) -> Plan:
        """The plan that runs now.

        Raises:
          ValueError: no step was made yet.
        """
        plan = self._known.plans[self._known.current]
        assert isinstance(plan, Plan)
        return plan

    @property
    def hardware(self) -> Hardware:
        """The hardware with the rates that are most likely by what the steps have taken; raises as `plan`."""
        return self._known.hardware

    @property
    def history(self) -> tuple[Event, ...]:
        """All measurements and decisions so far, with their reasons."""
        return () if self._begun is None else tuple(self._begun.history)

    @property
    def is_searching(self) -> bool:
        """Whether a search runs in the background, or has found something that is not tried yet; not after the end."""
        return self._steps_left > 0 and (self._search is not None or self._proposal is not None)

    @property
    def num_moves(self) -> int:
        """How often another plan has taken over."""
        return sum(event.action in ("tries", "goes back") for event in self.history)

    def close(self) -> None:
        """Ends the search as soon as its present problem is solved; steps go on with the plan that they have."""
        self._total_steps = 0
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._search = None

    def __enter__(self) -> "SearchingStep":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name, moves = short_name(self._first.options.function_name), format_count(self.num_moves, "move")
        return f"<SearchingStep {name} after {format_count(self.num_steps, 'step')}, {moves}>"

    def __str__(self) -> str:
        rows = [(str(e.num_steps), f"plan {e.plan}", e.action, e.reason) for e in self.history]
        return "\n".join([repr(self)[1:-1], *format_table(rows, "  ", right=(0,), wrap=(3,))])

    @property
    def _known(self) -> Replanner:
        if self._begun is None:
            raise ValueError("There is no plan before the first step: make one, or call `plan` of the planned step.")
        return self._begun

    @property
    def _steps_left(self) -> int:
        return max(self._total_steps - self.num_steps, 0)

    @property
    def _prices(self) -> Prices:
        return Prices(self._compile_s, self._move_s)

    def _begin(self, args: tuple[Any, ...]) -> Replanner:
        """Compiles the first plan, and searches it if that was not done."""
        arrays, structure = abstract_split(args)
        self._shapes = structure.unflatten(arrays)
        plan = self._first.plan(*args)
        slowest = max((link.s_per_byte for link in plan.hardware.links.values()), default=0.0)
        self._move_s = slowest * sum(tensor.num_bytes for tensor in plan.arguments)  # until a move is measured
        self._begun = Replanner(plan, self._plan_for, window_steps=self._window_steps)
        self._compile(0, self._first)
        return self._begun

    def _plan_for(self, hardware: Hardware, start: PlanData) -> Plan:
        """Searches a plan for hardware with other rates."""
        if not self._steps_left:
            raise CancelledError("The training has ended.")
        options = replace(
            self._first.options, hardware=hardware, start=start, time_limit_s=self._time_limit_s, progress="none"
        )
        step = self._first.with_options(options)
        plan = step.plan(*self._shapes)
        self._searched[id(plan)] = step
        return plan

    def _compile(self, number: int, step: PlannedFunction[Plan]) -> float | None:
        """Compiles a plan's step; returns the bytes at its peak, by the compiler."""
        start_s = self._clock()
        memory = memory_plan(step.compile(*self._shapes))
        self._compile_s = self._clock() - start_s
        self._compiled[number] = step
        return None if memory is None else memory.peak

    def _next_plan(self, replanner: Replanner, num_steps: int, settings: Any) -> int | None:
        """Finds and compiles the next plan in the background; returns its number."""
        if settings != jax_settings():
            raise ValueError("JAX's settings were changed for one thread only: change them by `jax.config.update`.")
        number = replanner.proposal(num_steps, self._steps_left, self._prices)
        new = {id(plan) for plan in replanner.plans}
        self._searched = {plan: step for plan, step in self._searched.items() if plan in new}
        if number is None or number in self._compiled or not self._steps_left:
            return number
        peak_bytes = self._compile(number, self._searched[id(replanner.plans[number])])
        limit = self._first.options.memory_limit_bytes
        if peak_bytes is not None and peak_bytes > limit:
            needs = f"its program needs {format_bytes(peak_bytes)}, and there are {format_bytes(limit)}"
            replanner.refuse(number, num_steps, needs)
            return None
        return number

    def _decide(self, replanner: Replanner) -> None:
        """Tries a proposal, goes back from one, or searches the next one, when the plan that runs was measured."""
        number, self._proposal = self._proposal, None
        if number is not None and self._try(replanner, number):
            return
        back = replanner.way_back(self.num_steps, self._steps_left, self._prices)
        if back is not None:
            replanner.move_to(back)
            self._is_new = self._has_moved = True
        self._search = self._thread.submit(self._next_plan, replanner, self.num_steps, jax_settings())

    def _take_found_plan(self, replanner: Replanner) -> None:
        """Takes what the search has found, if it has ended: the plan that runs is measured again before it is tried."""
        if self._search is None or not self._search.done():
            return
        search, self._search = self._search, None
        try:
            number = search.result()
        except CancelledError:
            return
        except Exception as error:  # a search that fails must not end a training that runs
            warnings.warn(f"The search while training has failed: {type(error).__name__}: {error}", stacklevel=3)
            replanner.tell(self.num_steps, replanner.current, "stays", f"the search failed: {error}")
            return
        self._proposal = number
        if number is not None:
            replanner.measure_again()

    def _try(self, replanner: Replanner, number: int) -> bool:
        """Tries a proposal if that still saves more than it costs: it is compiled now, and fewer steps are left."""
        outlook = replanner.outlook(number, self._steps_left, self._prices._replace(compile_s=0.0))
        if outlook.saved_s <= outlook.price_s:
            replanner.refuse(number, self.num_steps, outlook.reason)
            return False
        replanner.try_plan(number, self.num_steps, outlook.reason)
        self._is_new = self._has_moved = True
        return True

    def _moved(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments where the plan that runs wants them."""
        start_s = self._clock()
        moved = jax.block_until_ready(self.plan.shard(*args))
        self._move_s, self._has_moved = self._clock() - start_s, False
        return moved if isinstance(moved, tuple) else (moved,)


def search_while_training(
    step: PlannedFunction[Plan],
    num_steps: int,
    *,
    window_steps: int = 10,
    time_limit_s: float | None = 60.0,
    clock: Callable[[], float] = time.perf_counter,
) -> SearchingStep:
    """Runs a planned training step, and moves to better plans while it trains, when that pays.

    >>> step = diffshard.search(train_step, mesh, donate_argnums=0, time_limit_s=5)
    >>> with diffshard.elastic.search_while_training(step, num_steps=10_000) as step:
    ...     for batch in batches:
    ...         state, loss = step(state, batch)
    >>> print(step)

    The seconds of its own steps correct the rates of the hardware. A thread searches plans at the corrected rates and
    compiles them, and the state is moved to one if what it is expected to save in the steps that are left is more than
    compiling and moving. Measured seconds decide whether it stays there. A plan is tried once, and once more only where
    steps have begun to take other times, as where a machine is shared with a neighbour.

    What is computed is the same with every plan, to rounding. Each call waits for its results, so that it can be
    measured. The step of `resume` can be given, too; its checkpoints take the state of any plan.

    Args:
      step: of `diffshard.search`, or `step` of what `resume` returns. It takes the state first, and returns it anew.
      num_steps: that the training makes with it from now on.
      window_steps: steps whose median is one measurement.
      time_limit_s: seconds for each search in the background; None lets it end by its own rule.
      clock: returns seconds, for tests.

    Raises:
      TypeError: `step` is no planned function on a mesh, such as a pipeline.
      ValueError: its mesh is abstract or of several processes; it has an objective or number formats, whose searches
        are not about seconds alone; or a number is not positive.
    """
    if not isinstance(step, PlannedFunction):
        raise TypeError(
            f"`step` must be what `diffshard.search` returns for a mesh, without `pipeline`, or `training.step` of "
            f"`resume`, not {type(step).__name__}."
        )
    mesh = step.options.mesh
    if not isinstance(mesh, Mesh):
        raise ValueError("`step` has an abstract mesh, on which nothing runs: give `search` a jax.sharding.Mesh.")
    if not processes_of(mesh).is_one:
        raise ValueError(
            "`step` has a mesh of several processes, which would have to move to another plan at the same step: "
            "`search_while_training` is for one process. Measure with `diffshard.hardware.calibrate` before instead."
        )
    for name in ("objective", "formats"):
        if getattr(step.options, name) is not None:
            raise ValueError(f"`step` was searched with `{name}`: only plans that save seconds are searched meanwhile.")
    for name, value in {"num_steps": num_steps, "window_steps": window_steps}.items():
        checked_number(name, value, Count)
    replace(step.options, time_limit_s=time_limit_s)  # raises now what would be raised in the background
    return SearchingStep(step, num_steps, window_steps, time_limit_s, clock)
