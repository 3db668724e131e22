"""Plans by hand for the models here: shardings and rules of `diffshard.baselines`, and their programs.

Each is a function `(state, batch, mesh) -> HandPlan` for abstract or real arguments, on a mesh with axes "data" and
"model". Its shardings go to `diffshard.search(in_shardings=plan.in_shardings)`, or with its activation rules to
`lower_by_hand`, which uses `jax.jit` and flax alone.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cost.presets import preset
from diffshard.baselines.base import BASELINES, Baseline, BaselineMesh, describe_arguments
from diffshard.sharding_search.call import call_of
from diffshard.sharding_search.options import Options

# What the words for layers do not say: the experts of a mixture are split by expert, and their router is whole.
TENSOR_DIMENSIONS: dict[tuple[str, ...], int | None] = {
    ("feed_forward", "up"): -3,
    ("feed_forward", "down"): -3,
    ("gate", "kernel"): None,
}


class HandPlan(NamedTuple):
    """A plan by hand.

    Attributes:
      state, batch: a `NamedSharding` for each leaf.
      rules: by logical activation axis the mesh axes that split it, as flax users write them; other axes are not split.
    """

    state: Any
    batch: Any
    rules: Mapping[str, tuple[str, ...]]

    @property
    def in_shardings(self) -> tuple[Any, Any]:
        """The shardings of the step's two arguments."""
        return self.state, self.batch


MakeHandPlan = Callable[[Any, Any, Mesh | AbstractMesh], HandPlan]


def hand_plan(baseline: Baseline, state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Returns a baseline's plan for a training step."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, batch

    hardware = preset("h100", dict(mesh.shape))  # of which baselines know nothing
    call = call_of(Options(fn=step, mesh=mesh, hardware=hardware, memory_limit_bytes=math.inf), (state, batch), {})
    arguments = describe_arguments(call, [number == 0 for number in call.numbers])
    shardings = baseline(arguments, BaselineMesh(dict(mesh.shape), mesh.axis_names[-1]), TENSOR_DIMENSIONS)
    named_shardings = [NamedSharding(mesh, spec) for spec in shardings.specs]
    state_shardings, batch_shardings = jax.tree.unflatten(jax.tree.structure((state, batch)), named_shardings)
    return HandPlan(state_shardings, batch_shardings, dict(shardings.rules))


HAND_PLANS: dict[str, MakeHandPlan] = {name: functools.partial(hand_plan, make) for name, make in BASELINES.items()}
data_parallel, fsdp, megatron, megatron_fsdp = (
    HAND_PLANS[name] for name in ("data parallel", "fsdp", "megatron", "megatron fsdp")
)


def lower_by_hand(step: Callable[..., Any], state: Any, batch: Any, plan: HandPlan, **jit_options: Any) -> Any:
    """Lowers the step as it runs by hand: with the plan's shardings in and out, and its rules for activations."""
    mesh = jax.tree.leaves(plan.state)[0].mesh
    out = (plan.state, NamedSharding(mesh, P()))

    # A new function each time: `jax.jit` caches by function, and does not know the rules.
    def by_hand(state: Any, batch: Any) -> Any:
        return step(state, batch)

    run = jax.jit(by_hand, in_shardings=plan.in_shardings, out_shardings=out, **jit_options)
    with nn.logical_axis_rules(tuple(plan.rules.items())), jax.set_mesh(mesh):
        return run.lower(state, batch)
