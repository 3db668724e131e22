"""Damaged plan files: each is refused with a clear error, or is a plan that can be shown and given to its function.

A small plan is searched and saved. A case changes one entry of the file. Then the file is read and, if it is not
refused, shown as text, as a page and beside the original, and given to the function that it was made for. Whatever is
raised but `PlanError` counts as a raw error.
"""

import json

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import diffshard
from diffshard.base import PlanError
from diffshard.plans.file import from_json, to_json
from experiments.fuzzing.damage import Damage
from experiments.fuzzing.outcomes import REFUSED, TAKEN, error_outcome

MEMORY_LIMIT_BYTES = 3e6


def train_step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Trains two layers; the plan is for this function."""

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"]).sum()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), loss


def arguments() -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the shapes of `train_step`'s arguments."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return {"up": shape(256, 512), "down": shape(512, 256)}, shape(64, 256)


def small_plan() -> diffshard.Plan:
    """Searches the plan whose file is damaged."""
    mesh = AbstractMesh((2, 4), ("data", "model"))
    step = diffshard.search(train_step, mesh, hardware="h100", memory_limit_bytes=MEMORY_LIMIT_BYTES)
    return step.plan(*arguments())


class PlanDamage:
    """Damaged copies of a plan's file, and what becomes of them.

    Args:
      plan: the whole plan; None searches a small one.
    """

    def __init__(self, plan: diffshard.Plan | None = None):
        self.plan = small_plan() if plan is None else plan
        self.damage = Damage(json.loads(json.dumps(to_json(self.plan))))

    def outcome(self, seed: int) -> str:
        """Returns the outcome of a case: `REFUSED`, `TAKEN`, or an error and where it came from."""
        try:
            plan = from_json(self.damage.document_of(seed), "plan.json", diffshard.Plan)
            _ = str(plan), plan.html(), str(self.plan.diff(plan))
            plan.apply(train_step).plan(*arguments())
        except PlanError:
            return REFUSED
        except Exception as error:  # whatever it is, it is counted
            return error_outcome(error, seed)
        return TAKEN
