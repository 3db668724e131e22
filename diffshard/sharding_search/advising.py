"""What would make a planned step faster or smaller, with what each change gains on the plan's own problem.

A change of what is given (other donated arguments, no fixed shardings, no limit of the memory, another format) gives
another problem, on which the plan's choice is a start. Where the change only opens choices, whatever is found from
there is a plan that the user can have, so what it saves is saved at least.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from diffshard.base import Deadline, InfeasibleError
from diffshard.plans.printing import format_bytes, format_percent, format_s
from diffshard.plans.sections import LEAST_SHARE, MOST_LINES, Advice
from diffshard.sharding_search.layout import layout_of
from diffshard.sharding_search.plan import Plan
from diffshard.sharding_search.plan_store import start_of
from diffshard.sharding_search.planning import fastest_choice
from diffshard.sharding_search.request import PlanRequest
from diffshard.sharding_search.step_objective import step_s
from search_spaces.base import Choice
from search_spaces.sharding.format_gains import best_formats
from search_spaces.sharding.memory import memory_use
from search_spaces.sharding.one_device import on_one_device
from search_spaces.sharding.product_formats import takes_formats
from search_spaces.sharding.space import ShardingSpace

_LEAST_SOLVER_S, _SOLVER_SHARE = 3.0, 0.5
"""Seconds that a problem of advice may take, and the share of the plan's own search that it may take beyond that."""
_LEAST_PRODUCTS = 0.5
"""The share of a step that products take at least where another format of theirs is worth a line."""

_MOSTLY_WAITING = 2.0
"""How many times its computing a timeline takes at least where one device alone may be faster."""
_NEAR_LIMIT = 0.8
"""The share of the memory limit that a plan takes at least where the search asks what the limit costs."""


def find_with_advice(find: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """Returns the plan that is found for a request, with advice; a start that is taken as it is has its own."""
    deadline = request.options.deadline()
    plan = find(request)
    if plan == request.options.start or plan.status == "interrupted":
        return plan
    start_s = time.perf_counter()
    try:
        advice = advice_of(request, plan, deadline)
    except KeyboardInterrupt:  # what was found is not lost
        advice = ()
    return replace(plan, advice=advice, search_s=plan.search_s + time.perf_counter() - start_s)


def advice_of(request: PlanRequest, plan: Plan, deadline: Deadline) -> tuple[Advice, ...]:
    """Returns changes that would make a plan's step faster or smaller, the largest gain first.

    What gains less than a hundredth of the step's seconds or of the peak's bytes is left out.

    Args:
      deadline: of the search for it; advice that takes a search of its own has what is left.
    """
    advice = list(_of_whole_work(plan))
    if plan.logical_axis_rules == request.options.logical_axis_rules:  # else a baseline's, of another traced function
        if request.options.candidates:
            request = request.on(request.options.candidate_with(plan.mesh_axes))
        advice += _of_choice(request, plan, deadline)
    worth_it = [one for one in advice if _share(plan, one) >= LEAST_SHARE]
    return tuple(sorted(worth_it, key=lambda one: -_share(plan, one))[:MOST_LINES])


def _share(plan: Plan, advice: Advice) -> float:
    """Returns the larger share that advice saves, of the step's seconds or of the peak's bytes."""
    shares = ((advice.seconds, plan.step_s), (advice.num_bytes, plan.peak_bytes))
    return max(gain / whole if whole else 0.0 for gain, whole in shares)


def _faster(plan: Plan, how: str, seconds: float, words: str, what: str = "") -> Advice:
    """Returns advice that saves seconds: `at least 1.20 ms (3.4%) less: ...`."""
    share = format_percent(seconds / plan.step_s if plan.step_s else 0.0)
    return Advice(f"{how} {format_s(seconds)} ({share}) less{what}: {words}", seconds)


def _of_whole_work(plan: Plan) -> Iterator[Advice]:
    """Names what cannot be split, which every device computes whole, and what would split it."""
    for work in plan.whole_work:
        yield _faster(plan, "about", work.seconds, work.remedy, " computing")


def _of_choice(request: PlanRequest, plan: Plan, deadline: Deadline) -> Iterator[Advice]:
    """Looks for advice that needs the plan's choice in its space."""
    own = request.with_recomputed(plan)
    start = start_of(plan, own.space)
    if start is None or not start.is_exact:
        return
    choice: Choice = tuple(start.choice.tolist())
    yield from _of_one_device(own, plan)
    yield from _of_donating(own, plan, choice)
    yield from _of_float8(own, plan, choice)
    if plan.objective is None and plan.formats is None and plan.status in ("optimal", "finished"):
        yield from _of_given(own, plan, deadline)
        yield from _of_memory_limit(request, plan, choice if own is request else None, deadline)


def _of_one_device(request: PlanRequest, plan: Plan) -> Iterator[Advice]:
    """Compares a step whose timeline mostly waits for links with the same step on one device, which waits for none."""
    timeline = plan.timeline
    if timeline is None or timeline.seconds < _MOSTLY_WAITING * plan.compute_s or plan.objective:
        return
    alone = on_one_device(request.space)
    less = timeline.seconds - alone.step_s
    if less > LEAST_SHARE * timeline.seconds and alone.peak_bytes <= plan.memory_limit_bytes:
        words = (
            f"{format_s(less)} ({format_percent(less / timeline.seconds)}) less by the timeline: one device alone "
            f"takes {format_s(alone.step_s)}, without waiting for links; take fewer devices, or a larger batch or model"
        )
        yield Advice(words, min(less, plan.step_s))


def _of_donating(request: PlanRequest, plan: Plan, choice: Choice) -> Iterator[Advice]:
    """Prices the choice as it is if arguments were donated that results replace as a whole."""
    call, space = request.traced_function.call, request.space
    replaced = {argument for argument in space.graph.feedback if argument is not None}
    arrays: dict[int, list[int]] = {}
    for i, number in enumerate(call.numbers):
        arrays.setdefault(number, []).append(i)
    whole = [n for n, own in arrays.items() if replaced.issuperset(own) and not any(space.donated[i] for i in own)]
    if not whole:
        return
    also = {i for number in whole for i in arrays[number]}
    donating = space.with_donated([is_donated or i in also for i, is_donated in enumerate(space.donated)])
    num_bytes = plan.peak_bytes - float(np.max(memory_use(donating.usages, choice).num_bytes))
    if num_bytes <= 0 or num_bytes < LEAST_SHARE * plan.peak_bytes:
        return
    more_s = step_s(donating.predict(choice)) - step_s(space.predict(choice))  # where results have to be transposed
    price = f", though a step takes up to {format_s(more_s)} more" if more_s >= LEAST_SHARE * plan.step_s else ""
    names = [call.parameters[number] for number in whole]
    words = f"donate {_listed(names)} ({_donating(request, whole)}), whose memory the results that replace it can take"
    less = f"{format_bytes(num_bytes)} ({format_percent(num_bytes / plan.peak_bytes)}) less at the peak of the memory"
    yield Advice(f"{less}{price}: {words}", num_bytes=num_bytes)


def _donating(request: PlanRequest, numbers: list[int]) -> str:
    """Returns the option of `search` that donates arguments, beside those that are donated already."""
    options, parameters = request.options, request.traced_function.call.parameters
    # Those of `*args` have a position, too: `a[0]` of `*a`.
    with_position = [n for n in numbers if parameters[n] in options.positional_names or "[" in parameters[n]]
    positions = sorted({*options.donate_argnums, *with_position})
    names = [*options.donate_argnames, *(parameters[n] for n in numbers if n not in with_position)]
    given = [f"`donate_argnums={tuple(positions)}`"] * bool(with_position) + [f"`donate_argnames={names}`"] * (
        len(with_position) < len(numbers)
    )
    return " and ".join(given)


def _of_float8(request: PlanRequest, plan: Plan, choice: Choice) -> Iterator[Advice]:
    """Adds up what each product would gain in float8 as it is split, where products are most of the step."""
    rates, space, computing = plan.hardware.flops_per_s, request.space, plan.computing
    has_float8 = isinstance(rates, Mapping) and any(name.startswith("float8") for name in rates)
    trains = any(argument is not None for argument in space.graph.feedback)
    if not (has_float8 and trains) or plan.formats or plan.remat or plan.objective or plan.executor != "program":
        return
    if computing.products_s < _LEAST_PRODUCTS * plan.step_s:
        return
    products = [(vertex.index, "float8") for vertex in space.graph.vertices if takes_formats(vertex)]
    _, saved_s = best_formats(space.with_formats(dict.fromkeys(products, 0.0)), choice)
    seconds = min(saved_s, plan.step_s)
    option = "`formats=diffshard.formats.Formats(...)`"
    words = f"round products to float8 ({option}) as far as the loss allows, split as they are"
    yield _faster(plan, "at most", seconds, words)


def _of_given(request: PlanRequest, plan: Plan, deadline: Deadline) -> Iterator[Advice]:
    """Searches on from the plan with the shardings free that are given."""
    if not request.space.given or not _may_gain(request.space, plan):
        return
    space = replace(request.space, given={})
    start = start_of(plan, space)
    near = None if start is None else tuple(start.choice.tolist())
    seconds, choice = _seconds_and_choice(request._replace(space=space), plan, near, deadline)
    if choice is None or seconds >= plan.step_s:
        return
    call, specs = request.traced_function.call, space.layout(choice).input_specs
    before = layout_of(plan, request.space).input_specs
    changed = [call.parameters[call.numbers[i]] for i in request.space.given if specs[i] != before[i]]
    if changed:
        words = f"leave the sharding of {_listed(list(dict.fromkeys(changed)))} (given) to the search"
        yield _faster(plan, "at least", plan.step_s - seconds, words)


def _of_memory_limit(request: PlanRequest, plan: Plan, choice: Choice | None, deadline: Deadline) -> Iterator[Advice]:
    """Searches on from the plan's choice without a limit of the memory, and with nothing computed again."""
    if plan.peak_bytes < _NEAR_LIMIT * plan.memory_limit_bytes or not _may_gain(request.space, plan):
        return
    unlimited = request._replace(options=replace(request.options, memory_limit_bytes=np.inf))
    seconds, free = _seconds_and_choice(unlimited, plan, choice, deadline)
    if free is None or seconds >= plan.step_s:
        return
    peak_bytes = float(np.max(memory_use(request.space.usages, free).num_bytes))
    if peak_bytes > plan.memory_limit_bytes:
        words = f"give each device {format_bytes(peak_bytes)}, or more devices"
        yield _faster(plan, "at least", plan.step_s - seconds, words)


def _may_gain(space: ShardingSpace, plan: Plan) -> bool:
    """Returns whether a step in a space may be faster than a plan's by enough: none computes less than the least."""
    return plan.step_s - space.least_compute_s >= LEAST_SHARE * plan.step_s


def _seconds_and_choice(
    request: PlanRequest, plan: Plan, start: Choice | None, deadline: Deadline
) -> tuple[float, Choice | None]:
    """Returns the fastest step of a request that allows more than a plan's, and its choice.

    Returns inf and None where there is none, or no time to look for it.
    """
    if deadline.is_over():
        return np.inf, None
    _ = request.space.problem  # built before the solver's time begins
    seconds, left_s = max(_LEAST_SOLVER_S, _SOLVER_SHARE * plan.search_s), deadline.remaining_s()
    deadline = Deadline.from_now(seconds if left_s is None else min(seconds, left_s))
    request = request._replace(options=replace(request.options, start=None), progress=None)
    try:
        found = fastest_choice(request, deadline, None if start is None else np.array(start), LEAST_SHARE)
    except InfeasibleError:
        return np.inf, None
    return step_s(request.space.predict(found.choice)), found.choice


def _listed(names: list[str]) -> str:
    """Writes names as `a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
