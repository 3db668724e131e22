"""The space of communication strategies that change numbers as well as time."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cost.base import Hardware, Problem
from cost.presets import preset
from search_spaces.base import Batch, Choice, Params, Part, Selection, Traffic
from search_spaces.communication.costs import site_bytes, site_seconds
from search_spaces.communication.device_step import DeviceStep
from search_spaces.communication.emulation import emulate, on_devices
from search_spaces.communication.groups import as_sent, checked_strategies, group_sites
from search_spaces.communication.loss_increases import local_loss_increases
from search_spaces.communication.sites import Site, find_sites, trace_loss
from search_spaces.communication.strategies import DEFAULT, CollectiveStrategy

_WHOLE = PartitionSpec()
_Costs = tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]
"""Of nodes `[S]`, and by pair of nodes those of edges `[S, S']`."""


class CommunicationSpace:
    """A loss, written as every device computes it, with a choice of strategies at each of its collectives.

    The training loss is the mean of `loss_fn` over all devices. Everything runs on one device that emulates the mesh
    until `on_mesh` moves it onto real ones; the numbers are the same.

    Example, hidden units over the axis "model" and rows over "data"::

        def loss_fn(params, batch):
            x, target = batch
            with jax.named_scope("mlp"):
                x = x + jax.lax.psum(jax.nn.gelu(x @ params["up"]) @ params["down"], "model")
            return jnp.square(x - target).mean()

        specs = {"up": P(None, "model"), "down": P("model")}
        space = CommunicationSpace(loss_fn, {"data": 2, "model": 4}, params, batch, specs, P("data"), hardware=h100)
        choice = [space.strategy_names(v).index("bfloat16") for v in range(len(space.node_names))]
        step = jax.jit(space.decode(choice))
        loss, gradients, residuals = step(params, batch, space.init_residuals(params), key, 0)

    A *selection* says for each group what runs: the number of a strategy (an `int` is compiled in, a traced one is
    not and branches), or a vector of weights, for the weighted sum of all strategies' results.

    Args:
      loss_fn: `loss_fn(params, batch)`, this device's loss, with `jax.lax` collectives over the mesh's axes as in the
        body of a `jax.shard_map` that does not check replication: a sum's cotangents are summed, so that column- and
        row-parallel layers need no operators with derivatives of their own. Collectives in functions that have such
        stay exact (`notes` names them, where they are not in the derivative alone), and so do maxima.
      mesh_axes: devices along each mesh axis, the fastest axis last.
      params: pytree of floating-point arrays, or `jax.ShapeDtypeStruct`s, of whole shapes.
      batch: pytree of arrays, likewise.
      param_specs: a `PartitionSpec` for each leaf of `params`, or for each sub-tree; gradients are summed over the axes
        that are not in them.
      batch_specs: likewise.
      strategies: what each direction ("forward", "backward", "gradient") chooses from; `strategies.DEFAULT` without.
        Strategies that are not lossless and send as much as a lossless one are left out, and so are lossy ones for
        integers.
      tie: whether sites of a type share a strategy. Gradients that do travel as one vector.
      hardware: prices bytes, or the name of a preset; `problem` and `seconds` need it.

    Attributes:
      sites: all sites (see `sites.find_sites`).
      groups: what is chosen together, in the order of the problem's nodes and of a selection.
      notes: on collectives that stay as they are.
      arguments: `(params, batch)` that it is for, as `jax.ShapeDtypeStruct`s of whole shapes.

    Raises:
      ValueError: specs that do not fit the arrays or the mesh, parameters that are not floating-point, a loss that is
        no scalar, an unknown direction, strategies with equal names, residuals elsewhere than at gradients.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], jax.Array],
        mesh_axes: Mapping[str, int],
        params: Any,
        batch: Any,
        param_specs: Any,
        batch_specs: Any,
        *,
        strategies: Mapping[str, Sequence[CollectiveStrategy]] | None = None,
        tie: Literal["type"] | None = "type",
        hardware: Hardware | str | None = None,
    ):
        if tie not in ("type", None):
            raise ValueError(f"`tie` must be 'type' or None, not {tie!r}.")
        if not mesh_axes or min(mesh_axes.values()) < 1:
            raise ValueError(
                f"`mesh_axes` must name at least one axis with at least one device, got {dict(mesh_axes)}."
            )
        self.mesh_axes = dict(mesh_axes)
        self.hardware = preset(hardware, mesh_axes) if isinstance(hardware, str) else hardware
        self.num_devices = int(np.prod(list(mesh_axes.values())))
        self._axes = tuple(mesh_axes)
        self.arguments = jax.eval_shape(lambda *whole: whole, params, batch)
        self._traced = trace_loss(loss_fn, self.mesh_axes, params, batch, param_specs, batch_specs)
        self.notes = self._traced.notes
        self.sites: tuple[Site, ...] = find_sites(self._traced, self.mesh_axes)
        self.groups = group_sites(self.sites, {**DEFAULT, **checked_strategies(strategies or {})}, tie)
        self._step = DeviceStep(self._traced, self.sites, self.groups, self.num_devices)
        params_structure, batch_structure = self._traced.structure.children()
        self._specs = (
            jax.tree.unflatten(params_structure, self._traced.param_specs),
            jax.tree.unflatten(batch_structure, self._traced.batch_specs),
        )
        self._run: Callable[..., Callable[..., Any]] = partial(emulate, mesh_axes=self.mesh_axes)

    def on_mesh(self, mesh: Mesh) -> "CommunicationSpace":
        """The same space, running on the devices of a mesh.

        Raises:
          ValueError: the mesh's axes are not `mesh_axes`.
        """
        if dict(mesh.shape) != self.mesh_axes:
            raise ValueError(f"`mesh` has axes {dict(mesh.shape)}, but the space is for {self.mesh_axes}.")
        space = copy.copy(self)
        space._run = partial(on_devices, mesh=mesh)
        return space

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the groups, no two alike."""
        return tuple(group.name for group in self.groups)

    def strategy_names(self, node: int) -> tuple[str, ...]:
        """Returns the names of the strategies that a group chooses from."""
        return self.groups[node].names

    def decode(self, choice: Choice) -> "ChosenStep":
        """Returns the loss and gradients of a training step with a choice, as a function.

        Raises:
          ValueError: the choice has the wrong length or an index that its group does not have.
        """
        return ChosenStep(self, self._checked_choice(choice))

    def exact_choice(self) -> list[int]:
        """The first lossless strategy of each group.

        Raises:
          ValueError: a group has none.
        """
        for group in self.groups:
            if not group.lossless.any():
                raise ValueError(
                    f"The sites {group.name!r} have no lossless strategy among {group.names}; add Exact()."
                )
        return [int(group.lossless.argmax()) for group in self.groups]

    # What a selection computes.

    def loss(
        self, params: Any, batch: Any, selection: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """The training loss, a scalar; differentiable once in `params` and in weights, not in `batch`.

        Its derivatives pass the backward sites as selected; parameters' gradients are summed exactly.

        Args:
          params: whole arrays.
          batch: whole arrays.
          selection: for each group the index of a strategy, or weights `[S]`.
          key: a random key, for strategies that round stochastically.
          step: number of the training step, for schedules.
        """
        known, traced = self._checked_selection(selection)
        numbers = [None if x is None or x.ndim else x for x in traced]
        weights = [None if x is None or not x.ndim else x for x in traced]
        in_specs, others = (*self._specs, *[_WHOLE] * 4), (batch, numbers, key, jnp.asarray(step))

        def local(params: Any, weights: Any, batch: Any, numbers: Any, key: jax.Array, step: jax.Array) -> jax.Array:
            return self._step.loss(params, batch, key, step, _merged(_merged(known, numbers), weights))

        def value(params: Any, batch: Any, weights: Any, *others: Any) -> jax.Array:
            return lax.psum(local(params, weights, batch, *others), self._axes)

        def value_and_gradients(params: Any, batch: Any, weights: Any, *others: Any) -> Any:
            loss, (of_params, of_weights) = jax.value_and_grad(local, (0, 1))(params, weights, batch, *others)
            return lax.psum((loss, of_weights), self._axes), self._step.summed(of_params)

        # The gradient is taken on the devices: from outside, an emulated device's backward pass finds no axes.
        @jax.custom_vjp
        def total(params: Any, weights: Any, others: Any) -> jax.Array:
            return self._run(value, in_specs=in_specs, out_specs=_WHOLE)(params, others[0], weights, *others[1:])

        def forward(params: Any, weights: Any, others: Any) -> Any:
            run = self._run(value_and_gradients, in_specs=in_specs, out_specs=(_WHOLE, self._specs[0]))
            (loss, of_weights), of_params = run(params, others[0], weights, *others[1:])
            return loss, (of_params, of_weights)

        def backward(gradients: Any, cotangent: jax.Array) -> Any:
            return *jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), gradients), None

        total.defvjp(forward, backward)
        return total(params, weights, others)

    def mixed_loss(
        self, params: Any, batch: Any, weights: Selection, key: jax.Array, step: jax.Array | int = 0
    ) -> jax.Array:
        """The training loss where each site's result is Σ_j w_j · op_j(x); differentiable as `loss`.

        Backward sites mix cotangents likewise, gradient sites do not take part; the loss does not depend on the weights
        of either.

        Args:
          params: whole arrays.
          batch: whole arrays.
          weights: for each group `[S]`.
          key: a random key.
          step: number of the training step.
        """
        return self.loss(params, batch, [jnp.asarray(w) for w in weights], key, step)

    def loss_and_gradients(
        self,
        params: Any,
        batch: Any,
        selection: Selection,
        residuals: dict[str, jax.Array],
        key: jax.Array,
        step: jax.Array | int = 0,
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The training loss, its gradients as they arrive, and the residuals for the next step.

        The arguments are those of `loss`, and `residuals` as `init_residuals(params)` or the step before returned them.
        """
        known, traced = self._checked_selection(selection)

        def fn(params: Any, batch: Any, residuals: Any, key: jax.Array, step: jax.Array, traced: Any) -> Any:
            selected = _merged(known, traced)
            loss, gradients = jax.value_and_grad(self._step.loss)(params, batch, key, step, selected)
            return lax.psum(loss, self._axes), *self._step.send(gradients, residuals, key, step, selected)

        by_device = PartitionSpec(self._axes)
        in_specs = (*self._specs, by_device, _WHOLE, _WHOLE, _WHOLE)
        run = self._run(fn, in_specs=in_specs, out_specs=(_WHOLE, self._specs[0], by_device))
        return run(params, batch, residuals, key, jnp.asarray(step), traced)

    def init_residuals(self, params: Any) -> dict[str, jax.Array]:
        """Returns zero residuals: for each parameter that may have one an array `[devices, *local shape]` of float32.

        On a mesh the first dimension is split over all axes.
        """
        del params  # shapes are known since tracing
        return {
            self._traced.param_names[site.place]: jnp.zeros((self.num_devices, *site.shape), jnp.float32)
            for group in self.groups
            for site in (self.sites[s] for s in group.sites)
            if any(strategy.keeps_residual for strategy in group.strategies)
        }

    state = init_residuals

    def loss_increases(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        *,
        validation: Any = None,
        step_sizes: Any = 1.0,
        step: jax.Array | int = 0,
    ) -> list[jax.Array]:
        """By how much each strategy would raise the loss, to second order: for each group `[S]`, zero where lossless.

        With e the strategy's error (its result minus the exact one) in exact training otherwise, in units of the loss:

        - forward: ½ · mean over tokens of (g_t · e_t)², g_t the derivative of the token's share of the mean loss at the
          site's result, times the number of tokens. Tokens are all dimensions of the result but the last, on all
          devices; cotangents of copies of a result are summed. The Hessian is taken as the mean outer product of
          token gradients, and the errors of tokens as independent.
        - gradient: ¼ · Σ_i η_i e_i², η_i the parameter's step size: by so much the loss is higher where steps of noisy
          gradients and the pull to the minimum are in balance, whatever the Hessian is. Residuals are not accounted
          for: what is sent later counts as lost.
        - backward: the same for the error in parameters' gradients that e causes, estimated with random signs z as
          ¼ · Σ_t (a_t · e_t)², a the derivative of ⟨z √η, parameter gradient⟩ with respect to the site's result, which
          is the derivative of the forward site's operand along z √η.

        Of alternatives the first runs, and the others beside it for their own error alone. Where a group has its sites
        in other branches, its increases are measured where the alternatives around them, and all that are tied to
        these, run that branch, which takes as long again for each. Functions with a custom backward (`jax.custom_vjp`)
        that is not linear count at cotangents of 0 for backward sites.

        Source of the balance: Mandt, Hoffman and Blei, "Stochastic gradient descent as approximate Bayesian inference"
        (JMLR 2017), section 3.

        Args:
          params: whole arrays.
          batch: whole arrays.
          key: a random key.
          validation: a batch of the same shapes for forward loss_increases; `batch` without.
          step_sizes: η >= 0, one number, or numbers for each parameter: how far a unit of its gradient moves it.
          step: number of the training step.
        """
        whole = jax.tree.broadcast(step_sizes, params)
        step_sizes = jax.tree.map(lambda size, p: jnp.broadcast_to(size, p.shape).astype(jnp.float32), whole, params)
        signs: Any = optax.tree.random_like(
            jax.random.fold_in(key, 2**31 - 2), params, sampler=jax.random.rademacher, dtype=jnp.float32
        )
        along = jax.tree.map(lambda z, size, p: (z * jnp.sqrt(size)).astype(p.dtype), signs, step_sizes, params)

        def fn(*arguments: Any) -> list[jax.Array]:
            return lax.psum(local_loss_increases(self._step, *arguments), self._axes)

        params_spec, batch_spec = self._specs
        in_specs = (params_spec, batch_spec, batch_spec, params_spec, params_spec, _WHOLE, _WHOLE)
        run = self._run(fn, in_specs=in_specs, out_specs=_WHOLE)
        validation = batch if validation is None else validation
        return run(params, batch, validation, step_sizes, along, key, jnp.asarray(step))

    # What a selection costs.

    @property
    def problem(self) -> Problem:
        """The problem, with one node for each group; built once.

        A site inside a branch of alternatives costs something only if that branch is chosen: an edge between the group
        of the alternatives and the group of the site.

        Raises:
          ValueError: the space has no hardware.
        """
        return self._problem

    @cached_property
    def _problem(self) -> Problem:
        node_cost, edges = self._priced(self._seconds_of)
        pairs = np.array(list(edges), np.int64).reshape(-1, 2)
        return Problem(node_cost, pairs, list(edges.values()))

    def explain(self, choice: Choice) -> tuple[Part, ...]:
        """Returns one part for each group: its seconds in one step and what its sites send.

        Raises:
          ValueError: the choice does not fit the space, or the space has no hardware.
        """
        choice, seconds = self._checked_choice(choice), self._costs_of(choice, self._seconds)
        runs, sent_bytes = self._sites_that_run(choice), self.group_bytes(choice)
        parts = []
        for g, group in enumerate(self.groups):
            first = self.sites[group.sites[0]]
            running = [self.sites[s] for s in group.sites if runs[s]]
            count = sum(site.trips for site in as_sent(running)) if running else 0
            traffic = Traffic(first.direction, first.kind, first.axes, count, sent_bytes[g])
            parts.append(Part(group.name, first.kind, g, seconds[g], traffic))
        return tuple(parts)

    def _sites_that_run(self, choice: Choice) -> list[bool]:
        """Returns for each site whether it runs: whether all alternatives around it run the branch that it lies in."""
        runs: list[bool] = []
        running_branch: dict[int, int | None] = {}  # by the place of alternatives; None where they do not run
        for s, site in enumerate(self.sites):  # alternatives come before the sites in their branches
            runs.append(site.branch is None or running_branch[site.branch[0]] == site.branch[1])
            if site.kind == "alternatives":
                running_branch[site.place] = choice[self._step.group_of[s]] if runs[s] else None
        return runs

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds of communication and encoding in one step, without overlap; raises as `problem`."""
        return sum(self._costs_of(choice, self._seconds))

    def sent_bytes(self, choice: Sequence[int]) -> float:
        """Bytes that each device sends in the mean step."""
        return sum(self.group_bytes(choice))

    def group_bytes(self, choice: Sequence[int]) -> list[float]:
        """Bytes that each device sends in the mean step for each group, `[V]`."""
        return self._costs_of(choice, self._bytes)

    @cached_property
    def _seconds(self) -> _Costs:
        return self._priced(self._seconds_of)

    @cached_property
    def _bytes(self) -> _Costs:
        return self._priced(site_bytes)

    def _seconds_of(self, site: Site, strategy: CollectiveStrategy) -> float:
        if self.hardware is None:
            raise ValueError("`hardware` is None; give the space hardware with a link for each mesh axis.")
        return site_seconds(site, strategy, self.hardware)

    def _priced(self, cost: Callable[[Site, CollectiveStrategy], float]) -> _Costs:
        nodes = [np.zeros(len(group.names)) for group in self.groups]
        edges: dict[tuple[int, int], np.ndarray] = {}
        for g, group in enumerate(self.groups):
            for site in as_sent([self.sites[s] for s in group.sites]) if group.strategies else ():
                costs = np.array([cost(site, strategy) for strategy in group.strategies])
                if site.branch is None:
                    nodes[g] += costs
                else:
                    place, b = site.branch
                    a = self._step.group_of[self._step.site_at["forward", place]]
                    edge = edges.setdefault((a, g), np.zeros((len(self.groups[a].names), len(costs))))
                    edge[b] += costs
        return nodes, edges

    def _costs_of(self, choice: Sequence[int], costs: _Costs) -> list[float]:
        choice = self._checked_choice(choice)
        nodes, edges = costs
        totals = [float(node[i]) for node, i in zip(nodes, choice, strict=True)]
        for (u, v), edge in edges.items():
            totals[v] += float(edge[choice[u], choice[v]])
        return totals

    def _checked_choice(self, choice: Choice) -> tuple[int, ...]:
        known, _ = self._checked_selection(choice)
        for group, strategy in zip(self.groups, known, strict=True):
            if strategy is None:
                raise ValueError(
                    f"`choice` of {group.name!r} must be a strategy's index, an int; got weights or a tracer."
                )
        return tuple(strategy for strategy in known if strategy is not None)

    def _checked_selection(self, selection: Selection) -> tuple[list[int | None], list[Any]]:
        """Splits a selection in two: indices that are known now, and what is traced; None in the other's place."""
        if len(selection) != len(self.groups):
            raise ValueError(
                f"`choice` must have one entry for each of {len(self.groups)} groups, got {len(selection)}."
            )
        known: list[int | None] = []
        traced: list[Any] = []
        for group, chosen in zip(self.groups, selection, strict=True):
            number = isinstance(chosen, (int, np.integer)) and not isinstance(chosen, bool)
            if number and not 0 <= int(chosen) < len(group.names):
                raise ValueError(f"`choice` of {group.name!r} must be 0 to {len(group.names) - 1}, not {chosen}.")
            whole = jnp.ndim(chosen) == 0 and jnp.issubdtype(jnp.asarray(chosen).dtype, jnp.integer)
            if not number and not whole and jnp.shape(chosen) != (len(group.names),):
                raise ValueError(
                    f"`choice` of {group.name!r} must be an integer or {len(group.names)} weights, not {chosen!r}."
                )
            known.append(int(chosen) if number else None)  # type: ignore[arg-type]
            traced.append(None if number else jnp.asarray(chosen))
        return known, traced


@dataclass(frozen=True)
class ChosenStep:
    """The loss and the gradients of a training step with one choice.

    Attributes:
      space: whose groups are chosen for.
      choice: the index of a strategy for each group, `[V]`.
    """

    space: CommunicationSpace
    choice: tuple[int, ...]

    def __call__(
        self, params: Params, batch: Batch, residuals: dict[str, jax.Array], key: jax.Array, step: jax.Array | int = 0
    ) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
        """Returns the loss, its gradients and the next residuals; see `CommunicationSpace.loss_and_gradients`."""
        return self.space.loss_and_gradients(params, batch, self.choice, residuals, key, step)


def _merged(known: Sequence[Any], traced: Sequence[Any]) -> list[Any]:
    return [t if k is None else k for k, t in zip(known, traced, strict=True)]


def _example_loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(batch @ params["up"])
    return jnp.square(lax.psum(hidden @ params["down"], "model") - batch).mean()


EXAMPLE = partial(
    CommunicationSpace,
    _example_loss,
    {"data": 2, "model": 2},
    {"up": jax.ShapeDtypeStruct((8, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    jax.ShapeDtypeStruct((16, 8), jnp.float32),
    {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")},
    PartitionSpec("data"),
    hardware="h100",
)
