"""Plans that experts write by hand: data parallel, FSDP, Megatron, and Megatron with FSDP.

Each is a function `(state, batch, mesh) -> HandPlan` for abstract or real arguments of the models here, on a mesh with
axes "data" and "model". Its shardings go to `diffshard.search(in_shardings=plan.in_shardings)`, or with its activation
rules to `lower_by_hand`. Optimiser moments are sharded as their parameters are: their paths end alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class HandPlan(NamedTuple):
    """A plan by hand.

    Attributes:
      state, batch: a `NamedSharding` for each leaf.
      rules: by logical activation axis the mesh axes that split it, as flax users write them; other axes are not split.
        Without rules the compiler splits activations as it finds parameters split, and FSDP is lost.
    """

    state: Any
    batch: Any
    rules: Mapping[str, str | tuple[str, ...]]

    @property
    def in_shardings(self) -> tuple[Any, Any]:
        """The shardings of the step's two arguments."""
        return self.state, self.batch


Expert = Callable[[Any, Any, Mesh | AbstractMesh], HandPlan]

# The dimension of a parameter that Megatron splits over "model", by the last two names of its path. It is counted from
# the end, so that layers stacked for a scan need no rules of their own. Parameters that are not listed are replicated.
# Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; experts by Lepikhin et al. (arXiv:2006.16668).
_MEGATRON = {
    ("embed", "embedding"): -2,
    ("query", "kernel"): -2,
    ("key", "kernel"): -2,
    ("value", "kernel"): -2,
    ("out", "kernel"): -3,
    ("up", "kernel"): -1,
    ("swish", "kernel"): -1,
    ("up", "bias"): -1,
    ("down", "kernel"): -2,
    ("feed_forward", "up"): -3,
    ("feed_forward", "down"): -3,
    ("head", "kernel"): -1,
}


_MEGATRON_RULES = {"batch": "data", "heads": "model", "hidden": "model", "vocabulary": "model", "experts": "model"}


def data_parallel(state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Splits the batch over all devices and replicates the state."""
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
    return HandPlan(replicated, _split_batch(batch, mesh, mesh.axis_names), _batch_rules(mesh))


def fsdp(state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Splits the batch and every parameter over all devices, parameters along their largest dimension that divides.

    Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 3.
    """

    def shard(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _fully_sharded(P(*[None] * leaf.ndim), leaf.shape, mesh, mesh.axis_names))

    batch_shardings = _split_batch(batch, mesh, mesh.axis_names)
    return HandPlan(jax.tree.map(shard, state), batch_shardings, _batch_rules(mesh))


def hybrid_fsdp(state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Returns FSDP over "model", whose devices are neighbours, and data parallelism over "data".

    Source: Zhao et al., PyTorch FSDP (arXiv:2304.11277), section 3.2.2, hybrid sharding.
    """

    def shard(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _fully_sharded(P(*[None] * leaf.ndim), leaf.shape, mesh, ("model",)))

    return fsdp(state, batch, mesh)._replace(state=jax.tree.map(shard, state))


def megatron(state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Splits the batch over "data", and heads, hidden units, vocabulary and experts over "model"."""

    def shard(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, _tensor_parallel(path, leaf, mesh))

    return HandPlan(
        jax.tree.map_with_path(shard, state), _split_batch(batch, mesh, ("data",)), _megatron_rules(state, mesh)
    )


def megatron_fsdp(state: Any, batch: Any, mesh: Mesh | AbstractMesh) -> HandPlan:
    """Splits as Megatron does, and another dimension of each parameter over "data"."""

    def shard(path: Any, leaf: Any) -> NamedSharding:
        spec = _tensor_parallel(path, leaf, mesh)
        return NamedSharding(mesh, _fully_sharded(spec, leaf.shape, mesh, ("data",)))

    return megatron(state, batch, mesh)._replace(state=jax.tree.map_with_path(shard, state))


EXPERTS: tuple[Expert, ...] = (data_parallel, fsdp, megatron, megatron_fsdp)


def lower_by_hand(step: Callable[..., Any], state: Any, batch: Any, plan: HandPlan, **jit_options: Any) -> Any:
    """Lowers the step as an expert runs it: with the plan's shardings in and out, and its rules for activations."""
    mesh = jax.tree.leaves(plan.state)[0].mesh
    out = (plan.state, NamedSharding(mesh, P()))

    # A new function each time: `jax.jit` caches by function, and does not know the rules.
    def by_hand(state: Any, batch: Any) -> Any:
        return step(state, batch)

    jitted = jax.jit(by_hand, in_shardings=plan.in_shardings, out_shardings=out, **jit_options)
    with nn.logical_axis_rules(tuple(plan.rules.items())), jax.set_mesh(mesh):
        return jitted.lower(state, batch)


def _batch_rules(mesh: Mesh | AbstractMesh) -> dict[str, tuple[str, ...]]:
    return {"batch": tuple(mesh.axis_names), "expert_batch": tuple(mesh.axis_names)}


def _megatron_rules(state: Any, mesh: Mesh | AbstractMesh) -> dict[str, str | tuple[str, ...]]:
    """Returns Megatron's rules, except for dimensions of this model that "model" does not divide."""
    rules: dict[str, str | tuple[str, ...]] = {**_MEGATRON_RULES, "key_value_heads": "model", "expert_batch": "data"}
    dimensions = {
        "heads": ("query", "kernel"),
        "key_value_heads": ("key", "kernel"),
        "vocabulary": ("embed", "embedding"),
    }
    for path, leaf in jax.tree.leaves_with_path(state):
        for logical, names in dimensions.items():
            if _names(path)[-2:] == names and leaf.shape[_MEGATRON[names]] % mesh.shape["model"]:
                rules.pop(logical, None)
    return rules


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)


def _split_batch(batch: Any, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> Any:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(tuple(axes), *[None] * (leaf.ndim - 1))), batch)


def _tensor_parallel(path: Any, leaf: Any, mesh: Mesh | AbstractMesh) -> P:
    spec: list[Any] = [None] * leaf.ndim
    dimension = _megatron_dimension(_names(path))
    if dimension is not None and leaf.shape[dimension] % mesh.shape["model"] == 0:
        spec[dimension] = "model"
    return P(*spec)


def _megatron_dimension(names: tuple[str, ...]) -> int | None:
    """Returns the dimension to split, from the end, or None; layers of a plain list alternate as column and row."""
    layer, name = names[-2:] if len(names) >= 2 else ("", "")
    if layer.isdigit():
        column = int(layer) % 2 == 0
        return {"kernel": -1 if column else -2, "bias": -1 if column else None}.get(name)
    return _MEGATRON.get((layer, name))


def _fully_sharded(spec: P, shape: Sequence[int], mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> P:
    """Returns the spec with its largest free dimension that divides split over `axes`; unchanged if none divides."""
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    free = [d for d, taken in enumerate(spec) if taken is None and shape[d] and shape[d] % parts == 0]
    if not free:
        return spec
    largest = max(free, key=lambda d: shape[d])
    return P(*(tuple(axes) if d == largest else taken for d, taken in enumerate(spec)))
