"""What measured steps say about the rates of hardware: one Gaussian over how much slower each is than its price.

The price of a plan is a sum of terms, each proportional to the slowness of one rate: of arithmetic, of the memory, and
of the latency and the bytes of each mesh axis's link. So the derivative of its logarithm by the logarithm of a slowness
is that rate's share of the step, and one measured step moves each rate by its share. Priors keep one number from moving
everything: all rates may be off together, as where a machine is shared, each by itself, and each plan has an error of
its own that no rate explains. Plans that do nearly the same have nearly the same error.

With x the logarithms of the slowness of R rates in each environment (a time without a change of the machine), δ_p the
own error of plan p and T_p its price, the seconds y of a step are measured as

    log y = log T_p(x) + δ_p + noise,    x ~ N(0, s² I + u² 1 1ᵀ),    δ ~ N(0, τ² K),

whose most likely point is found by Gauss-Newton steps (Bell and Cathey 1993, "The iterated Kalman filter update as a
Gauss-Newton method", equation 8). K is the min-max kernel of what plans spend on each operation and collective.

Letters for sizes: R rates, E environments, P plans, M measurements.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cost.base import Hardware, Link
from cost.collectives import collective_sent_bytes
from cost.lines import Line
from diffshard.plans.base import PlanData

EACH_RATE, ALL_RATES = np.log(2.0), np.log(2.0)
"""Standard deviations of the logarithms of one rate's slowness and of all: presets are wrong by such factors."""
CHANGE_OF_EACH, CHANGE_OF_ALL = np.log(1.5), np.log(2.0)
"""The same of what a change of the environment does."""
PLAN_ERROR = 0.15
"""Standard deviation of a plan's own error, relative: prices of compiled plans are off by 10 to 20% at right rates."""
_MOST_ITERATIONS, _CONVERGED = 50, 1e-6


class PlanTerms(NamedTuple):
    """A plan's price as terms of rates.

    Attributes:
      computing, blocking, overlapped: `[R]` seconds of arithmetic and memory traffic, of collectives that arithmetic
        waits for, and of those that can overlap with it.
      exposed_share: what a step waits for the latter at least.
      log_slowness: `[R]` of the hardware for which the plan was priced.
      parts: seconds of each operation and collective, by how they run.
    """

    computing: np.ndarray
    blocking: np.ndarray
    overlapped: np.ndarray
    exposed_share: float
    log_slowness: np.ndarray
    parts: Mapping[tuple, float]


class Measurement(NamedTuple):
    """The seconds of a plan's steps: their logarithm and its standard deviation."""

    environment: int
    plan: int
    log_s: float
    deviation: float


class Belief(NamedTuple):
    """A Gaussian over `[E * R + P]` logarithms: the slowness of rates in each environment, then the plans' errors."""

    mean: np.ndarray
    covariance: np.ndarray


def rate_names(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the names of the R rates on a mesh; axes of one device have no link."""
    links = (f"{part} of {axis}" for axis, size in axes.items() if size > 1 for part in ("latency", "bytes"))
    return "arithmetic", "memory", *links


def scaled(hardware: Hardware, log_slowness: Mapping[str, float]) -> Hardware:
    """Returns hardware with rates as much slower as the logarithms say, by the names of `rate_names`.

    Launches of kernels and copies from the host's memory are as much slower as the memory, as in `terms_of`. Laws of
    measured kernels (`Hardware.measured`) stay as they are.
    """
    slower = {name: float(np.exp(x)) for name, x in log_slowness.items()}

    def scaled_link(axis: str, link: Link) -> Link:
        latency, s_per_byte = slower.get(f"latency of {axis}", 1.0), slower.get(f"bytes of {axis}", 1.0)
        by_kind = {
            kind: tuple(Line(line.latency_s * latency, line.s_per_byte * s_per_byte) for line in lines)
            for kind, lines in link.by_kind.items()
        }
        by_ring = {"latency_s": link.latency_s * latency, "s_per_byte": link.s_per_byte * s_per_byte}
        return replace(link, **by_ring, by_kind=by_kind)

    rates, divisor, host_rate = hardware.flops_per_s, slower["arithmetic"], hardware.host_memory_bytes_per_s
    return replace(
        hardware,
        flops_per_s={n: r / divisor for n, r in rates.items()} if isinstance(rates, Mapping) else rates / divisor,
        memory_bytes_per_s=hardware.memory_bytes_per_s / slower["memory"],
        kernel_launch_s=hardware.kernel_launch_s * slower["memory"],
        host_memory_bytes_per_s=None if host_rate is None else host_rate / slower["memory"],
        links={axis: scaled_link(axis, link) for axis, link in hardware.links.items()},
    )


def terms_of(plan: PlanData, log_slowness: np.ndarray) -> PlanTerms:
    """Returns the terms of a plan that was priced for hardware of this slowness, `[R]`."""
    names = rate_names(plan.mesh_axes)
    computing, blocking, overlapped = np.zeros((3, len(names)))
    products_s = min(plan.computing.products_s, plan.compute_s)
    computing[:2] = products_s, plan.compute_s - products_s
    parts: defaultdict[tuple, float] = defaultdict(float)
    for i, o in enumerate(plan.operations):
        parts[i, o.operands, o.unreduced, o.results, o.format] += o.compute_s
    for c in plan.collectives:
        sent = float(collective_sent_bytes(c.kind, c.num_bytes, plan.mesh_axes[c.axis]))  # pyright: ignore[reportArgumentType]
        lines = plan.hardware.link(c.axis).lines(c.kind)  # pyright: ignore[reportArgumentType]
        fastest = min(lines, key=lambda line: line.latency_s + line.s_per_byte * sent)
        bytes_s = min(c.count * sent * fastest.s_per_byte, c.link_s)
        own = overlapped if c.seconds < c.link_s else blocking
        own[names.index(f"latency of {c.axis}")] += c.link_s - bytes_s
        own[names.index(f"bytes of {c.axis}")] += bytes_s
        parts[c.kind, c.axis, c.num_bytes, c.made_by, c.read_by] += c.seconds
    return PlanTerms(computing, blocking, overlapped, plan.hardware.exposed_share, log_slowness, parts)


def log_seconds(terms: PlanTerms, log_slowness: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the logarithm of a plan's seconds at other rates, and its gradient `[R]`: each rate's share."""
    slower = np.exp(log_slowness - terms.log_slowness)
    waits_for_links = (terms.overlapped - terms.computing) @ slower > terms.exposed_share * terms.overlapped @ slower
    part = terms.overlapped if waits_for_links else terms.computing + terms.exposed_share * terms.overlapped
    part_s = (terms.blocking + part) * slower
    seconds = part_s.sum()
    return float(np.log(seconds)), part_s / seconds


def likeness(one: PlanTerms, other: PlanTerms) -> float:
    """Returns how much of their seconds two plans spend in the same way, from 0 to 1: the min-max kernel."""
    keys = one.parts.keys() | other.parts.keys()
    pairs = [(one.parts.get(key, 0.0), other.parts.get(key, 0.0)) for key in keys]
    most = sum(map(max, pairs))
    return sum(map(min, pairs)) / most if most else 1.0


def learn(plans: Sequence[PlanTerms], measurements: Sequence[Measurement], num_environments: int) -> Belief:
    """Returns the rates in each environment, and the plans' own errors, as measurements of plans imply them."""
    num_rates, num_plans = len(plans[0].computing), len(plans)
    alike = np.minimum.outer(np.arange(num_environments), np.arange(num_environments))  # changes that two share
    first = _of_rates(num_rates, EACH_RATE, ALL_RATES)
    changes = _of_rates(num_rates, CHANGE_OF_EACH, CHANGE_OF_ALL)
    size = num_environments * num_rates
    prior = np.zeros((size + num_plans, size + num_plans))
    prior[:size, :size] = np.kron(np.ones_like(alike), first) + np.kron(alike, changes)
    prior[size:, size:] = PLAN_ERROR**2 * np.array([[likeness(p, q) for q in plans] for p in plans])
    mean = np.zeros(len(prior))
    if not measurements:
        return Belief(mean, prior)
    measured = np.array([m.log_s for m in measurements])
    noise = np.diag([m.deviation**2 for m in measurements])
    gain, gradient = np.zeros((len(prior), 0)), np.zeros((0, len(prior)))
    for _ in range(_MOST_ITERATIONS):
        belief = Belief(mean, prior)
        pairs = [predict(belief, plans, m.plan, m.environment) for m in measurements]
        predicted, gradient = np.array([p for p, _ in pairs]), np.stack([g for _, g in pairs])
        gain = np.linalg.solve(gradient @ prior @ gradient.T + noise, gradient @ prior).T
        new = gain @ (measured - predicted + gradient @ mean)
        distance, mean = np.abs(new - mean).max(), new
        if distance < _CONVERGED:
            break
    return Belief(mean, prior - gain @ gradient @ prior)


def predict(belief: Belief, plans: Sequence[PlanTerms], plan: int, environment: int) -> tuple[float, np.ndarray]:
    """Returns the logarithm of a plan's seconds in an environment, and its gradient by all of `Belief.mean`."""
    num_rates = len(plans[plan].computing)
    own = slice(environment * num_rates, (environment + 1) * num_rates)
    error = len(belief.mean) - len(plans) + plan
    gradient = np.zeros(len(belief.mean))
    value, gradient[own] = log_seconds(plans[plan], belief.mean[own])
    gradient[error] = 1.0
    return value + float(belief.mean[error]), gradient


def _of_rates(num_rates: int, each: float, together: float) -> np.ndarray:
    return each**2 * np.eye(num_rates) + together**2 * np.ones((num_rates, num_rates))
