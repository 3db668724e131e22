"""Which plan a training should run, from the seconds that its steps have taken so far; without clocks and threads.

Steps are measured in windows. The first window on a plan corrects the prices (`rates.py`), and then plans are searched
at the corrected rates: at the most likely ones, and at samples of what they may be, because a link that the plan does
not use shows nothing of itself. A proposal is tried if what it is expected to save in the steps that are left is more
than compiling it, moving there and, if it turns out to be slower, measuring it and moving back:

    left · T · E[max(1 - e^d, 0)]  >  compile + move · (1 + P(d > 0)) + window · T · E[max(e^d - 1, 0)]

with T the seconds of a step now and d the logarithm of the ratio of both plans' seconds, a Gaussian. Before a trial the
plan that runs is measured again, so that both windows are near each other. After its own first window a plan is kept,
or left for one that was measured to be faster. In one environment each plan is tried once, and only a plan on trial is
left for one that was tried before: so a training never moves to and fro.

Where later windows depart from the first one, the environment has changed: rates are open again, while what was learnt
of the plans' own errors stays, but for a measurement since which no window has been like the first one. After each
change it takes twice as many such windows to see the next one.

Source: expected improvement as in Jones, Schonlau and Welch 1998, "Efficient global optimization of expensive black-box
functions", section 4.1; plans at sampled rates as in Thompson 1933.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cost.base import Hardware
from diffshard.elastic.rates import Belief, Measurement, PlanTerms, learn, predict, rate_names, scaled, terms_of
from diffshard.plans.base import PlanData
from diffshard.plans.printing import format_count, format_percent, format_s
from diffshard.sharding_search.fingerprints import plan_facts

NUM_SAMPLES = 3
"""Searches at sampled rates after each measurement, beside the one at the most likely rates."""
MOST_TRIALS = 8
"""Plans that are tried in one environment."""
LEAST_DEVIATION = 0.02
"""The least standard deviation of a window's median, in logarithms: machines drift by that between windows."""
CHANGE = math.log(1.25)
"""By how much windows depart from the first one, in logarithms, where the environment has changed; or 4 deviations."""
FIRST_PATIENCE = 2
"""Windows in a row that depart where the environment has changed, before the first change."""


class Event(NamedTuple):
    """A decision.

    Attributes:
      num_steps: made before it.
      plan: the number of the plan that it is about, in the order in which plans were found.
      action: "begins", "measured", "tries", "goes back", "stays" or "environment changed".
      reason: in words.
    """

    num_steps: int
    plan: int
    action: str
    reason: str


class Outlook(NamedTuple):
    """The expected gain and price of running another plan from now on.

    Attributes:
      saved_s: expected seconds saved in all steps that are left, without the price of moving.
      price_s: expected seconds of compiling, moving, and finding out that the plan is slower.
      reason: both in words.
    """

    saved_s: float
    price_s: float
    reason: str


class Prices(NamedTuple):
    """The seconds of a move, as far as they are known.

    Attributes:
      compile_s: seconds; 0 for a plan that is compiled.
      move_s: seconds of moving the state from one plan to another.
    """

    compile_s: float
    move_s: float


class Replanner:
    """The decisions of one training.

    Args:
      plan: the first one.
      search: finds a plan for other hardware, beginning with a plan.
      window_steps: steps of one window.
      seed: of the samples of rates.

    Attributes:
      plans: all that were found, in order.
      current: the number of the one that runs.
      history: what was decided, and why.
    """

    def __init__(
        self,
        plan: PlanData,
        search: Callable[[Hardware, PlanData], PlanData],
        *,
        window_steps: int = 10,
        seed: int = 0,
    ):
        self.plans: list[PlanData] = []
        self.history: list[Event] = []
        self.current = 0
        self._hardware, self._search = plan.hardware, search
        self._axes = dict(plan.mesh_axes)
        self._window_steps, self._window = window_steps, []
        self._random = np.random.default_rng(seed)
        self._keys: list[dict[str, str]] = []
        self._terms: list[PlanTerms] = []
        self._measurements: list[Measurement] = []
        self._environment, self._patience, self._num_departed = 0, FIRST_PATIENCE, 0
        self._tried: set[int] = {self._add(plan, np.zeros(len(self._rates)))}
        self._is_on_trial = self._measures_again = False
        self._unconfirmed: Measurement | None = None  # made the training go back, and the machine may have changed then
        self.tell(0, 0, "begins", f"{format_s(plan.step_s)} predicted")

    @property
    def _rates(self) -> tuple[str, ...]:
        return rate_names(self._axes)

    @property
    def _own_rates(self) -> slice:
        """Where the rates of this environment are in a belief."""
        return slice(self._environment * len(self._rates), (self._environment + 1) * len(self._rates))

    @property
    def hardware(self) -> Hardware:
        """The hardware with the rates that are most likely now."""
        return scaled(self._hardware, self._named(self.belief().mean[self._own_rates]))

    def tell(self, num_steps: int, plan: int, action: str, reason: str) -> None:
        """Writes a decision down."""
        self.history.append(Event(num_steps, plan, action, reason))

    def record(self, step_s: float, num_steps: int) -> bool:
        """Takes the seconds of a step that ran undisturbed; returns whether there is something to decide now.

        Args:
          step_s: seconds.
          num_steps: that the training has made.
        """
        self._window.append(math.log(step_s))
        if len(self._window) < self._window_steps:
            return False
        measurement = self._measured()
        first = self._first_window(self.current)
        if first is None:
            self._note(measurement, num_steps)
            return True
        threshold = max(CHANGE, 4 * math.hypot(first.deviation, measurement.deviation))
        departs = abs(measurement.log_s - first.log_s) > threshold
        self._num_departed = self._num_departed + 1 if departs else 0
        if not departs:
            self._unconfirmed = None
            if self._measures_again:
                self._measurements.remove(first)
                self._note(measurement, num_steps)
                return True
        if self._num_departed < self._patience:
            return False
        self._measurements = [m for m in self._measurements if m is not self._unconfirmed]
        self._environment += 1
        self._num_departed, self._patience = 0, 2 * self._patience
        self._measures_again = False
        self._tried, self._is_on_trial = {self.current}, False
        self._measurements.append(measurement._replace(environment=self._environment))
        before_s, now_s = format_s(math.exp(first.log_s)), format_s(math.exp(measurement.log_s))
        self.tell(num_steps, self.current, "environment changed", f"steps take {now_s} that took {before_s}")
        return True

    def restart_window(self) -> None:
        """Forgets the steps of a window that is not full: something else ran meanwhile."""
        self._window.clear()

    def measure_again(self) -> None:
        """Lets the next window that is like the first one of the plan that runs take its place, near a trial."""
        self._window.clear()
        self._measures_again = True

    def way_back(self, num_steps: int, steps_left: int, prices: Prices) -> int | None:
        """Returns the plan to leave a plan on trial for, after its first window; None to stay."""
        is_on_trial, self._is_on_trial = self._is_on_trial, False
        known = [i for i in self._tried if self._first_window(i) is not None]
        if not is_on_trial or self.current not in known:
            return None
        belief = self.belief()
        step_s = {i: math.exp(predict(belief, self._terms, i, self._environment)[0]) for i in known}
        best = min(known, key=lambda i: step_s[i])
        saved_s = steps_left * (step_s[self.current] - step_s[best])
        if saved_s <= prices.move_s:
            return None
        self._unconfirmed = self._first_window(self.current)
        reason = f"{format_s(step_s[best])} in place of {format_s(step_s[self.current])}, both measured"
        self.tell(num_steps, best, "goes back", reason)
        return best

    def proposal(self, num_steps: int, steps_left: int, prices: Prices) -> int | None:
        """Searches plans at corrected rates; returns the number of one that is worth a trial, None for none."""
        reasons = []
        belief = self.belief()
        for log_slowness in self._possible_rates(belief):
            if len(self._tried) >= MOST_TRIALS:
                break
            plan = self._search(scaled(self._hardware, self._named(log_slowness)), self.plans[self.current])
            number = self._add(plan, log_slowness)
            if number in self._tried:
                continue
            outlook = self.outlook(number, steps_left, prices)
            if outlook.saved_s > outlook.price_s:
                return number
            reasons.append(f"plan {number} {outlook.reason}")
        self.tell(num_steps, self.current, "stays", "; ".join(dict.fromkeys(reasons)) or "no other plan is found")
        return None

    def try_plan(self, number: int, num_steps: int, reason: str) -> None:
        """Notes that a proposal runs from now on."""
        self.tell(num_steps, number, "tries", reason)
        self.move_to(number)
        self._is_on_trial = True

    def move_to(self, number: int) -> None:
        """Notes that a plan runs from now on."""
        self.current = number
        self._tried.add(number)
        self._window.clear()
        self._num_departed, self._measures_again = 0, False

    def refuse(self, number: int, num_steps: int, reason: str) -> None:
        """Notes that a plan cannot be run: it is not proposed again in this environment."""
        self._tried.add(number)
        self.tell(num_steps, number, "stays", reason)

    def outlook(self, number: int, steps_left: int, prices: Prices) -> Outlook:
        """Returns the seconds that a plan which is not tried yet is expected to save, and to cost, from now on."""
        belief = self.belief()
        new, new_gradient = predict(belief, self._terms, number, self._environment)
        now, gradient = predict(belief, self._terms, self.current, self._environment)
        difference, direction = new - now, new_gradient - gradient
        deviation = math.sqrt(max(float(direction @ belief.covariance @ direction), 1e-12))
        gain, loss = _expected_gain(difference, deviation), _expected_gain_of_inverse(difference, deviation)
        step_s, is_slower = math.exp(now), _normal(difference / deviation)
        price_s = prices.compile_s + prices.move_s * (1 + is_slower) + self._window_steps * step_s * loss
        saved_s = steps_left * step_s * gain
        new_s = f"{format_s(math.exp(new))} ± {format_percent(deviation)}"
        reason = (
            f"should take {new_s} in place of {format_s(step_s)}, which saves {format_s(saved_s)} in "
            f"{format_count(steps_left, 'step')} for {format_s(price_s)}"
        )
        return Outlook(saved_s, price_s, reason)

    def belief(self) -> Belief:
        """Returns the belief about the rates and the plans' own errors."""
        return learn(self._terms, self._measurements, self._environment + 1)

    def _possible_rates(self, belief: Belief) -> Sequence[np.ndarray]:
        """Returns the most likely rates and samples of them, `[1 + NUM_SAMPLES, R]`."""
        own = self._own_rates
        mean, covariance = belief.mean[own], belief.covariance[own, own]
        samples = self._random.multivariate_normal(mean, covariance, NUM_SAMPLES, method="eigh")
        return [mean, *samples]

    def _named(self, log_slowness: np.ndarray) -> dict[str, float]:
        return dict(zip(self._rates, log_slowness.tolist(), strict=True))

    def _add(self, plan: PlanData, log_slowness: np.ndarray) -> int:
        """Returns the number of a plan, which is a new one unless another one runs alike."""
        key = plan_facts(plan)
        if key not in self._keys:
            terms = terms_of(plan, log_slowness)  # before anything is noted: other threads read these lists
            self._terms.append(terms)
            self.plans.append(plan)
            self._keys.append(key)
        return self._keys.index(key)

    def _note(self, measurement: Measurement, num_steps: int) -> None:
        """Takes a window for the first one of the plan that runs."""
        self._measures_again = False
        self._measurements.append(measurement)
        spread = format_percent(measurement.deviation)
        self.tell(num_steps, self.current, "measured", f"{format_s(math.exp(measurement.log_s))} ± {spread}")

    def _measured(self) -> Measurement:
        """Returns the median of a full window, with what its spread says of the median's deviation."""
        median = statistics.median(self._window)
        spread = 1.4826 * statistics.median(abs(value - median) for value in self._window)
        deviation = 1.2533 * spread / math.sqrt(len(self._window))  # of a Gaussian's median
        self._window.clear()
        return Measurement(self._environment, self.current, median, max(deviation, LEAST_DEVIATION))

    def _first_window(self, plan: int) -> Measurement | None:
        """Returns the measurements of a plan in this environment."""
        return next((m for m in self._measurements if (m.environment, m.plan) == (self._environment, plan)), None)


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _expected_gain(mean: float, deviation: float) -> float:
    """Returns E[max(1 - e^d, 0)] of a Gaussian d."""
    x = -mean / deviation
    return max(_normal(x) - math.exp(mean + deviation**2 / 2) * _normal(x - deviation), 0.0)


def _expected_gain_of_inverse(mean: float, deviation: float) -> float:
    """Returns E[max(e^d - 1, 0)] of a Gaussian d."""
    return _expected_gain(mean, deviation) + math.exp(mean + deviation**2 / 2) - 1.0
