"""`TablePlan`: which device holds what, what that is predicted to cost, and the lookups that run so.

Letters for sizes: D devices, B examples, P ids of an example at most.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from diffshard.base import PlanError, checked_mesh
from diffshard.host_memory import HOST_MEMORY
from diffshard.plans.documents import TABLES, RecordFile
from diffshard.plans.plan_record import PlanRecord
from diffshard.sharding_search.options import with_automatic_axes
from diffshard.tables import checks
from diffshard.tables.arrays import TableArrays, random_hosts, shapes_of, to_numbers, to_tables
from diffshard.tables.each_host import EachHostPrograms
from diffshard.tables.layout import check_fits
from diffshard.tables.plan_data import TablePlanData, axes_across, check_table_plan, format_table_plan
from diffshard.tables.programs import DevicePrograms
from search_spaces.embedding_tables.optimizers import Step
from search_spaces.embedding_tables.prices import lookup_and_update_s
from search_spaces.sharding.own_collectives import stating_seconds

_EPSILON = 1e-8  # as in FBGEMM


@dataclass(frozen=True)
class TablePlan(TablePlanData, PlanRecord):
    """Where embedding tables are on devices. Made by `diffshard.tables.shard_tables`; `print` shows it.

    Its fields are those of `TablePlanData`.
    """

    _file = RecordFile(TABLES, 2, check_table_plan, without=("mesh",))

    def init(self, key: jax.Array | int) -> TableArrays:
        """Returns tables of uniform numbers within ±1/√rows, made on the devices that hold them.

        Args:
          key: a JAX random key or a seed.

        Raises:
          PlanError: the plan's devices are not here, or its arrays do not fit.
        """
        specs, of_each = self._specs, self._each_host

        def make(key_data: jax.Array) -> Any:
            return *self._programs.init(key_data), of_each.init(key_data) if of_each else {}

        run = self._mapped(make, (PartitionSpec(),), (specs.shards, specs.copies, specs.each_host))
        key_data = jax.random.key_data(checks.checked_key(key))
        sharding = NamedSharding(self._mesh_here(), self._batch, memory_kind=HOST_MEMORY)
        shards, copies, each_host = jax.jit(run)(key_data)
        return TableArrays(shards, copies, random_hosts(self.layout, np.asarray(key_data), sharding), each_host)

    def shapes(self) -> tuple[Any, Any]:
        """Returns the tables and their optimiser's state as `jax.ShapeDtypeStruct`s, `TableArrays` of them.

        So a step that they are part of can be planned where the devices are not here.
        """
        return shapes_of(self.layout)

    def shard(self, tables: Mapping[str, Any]) -> TableArrays:
        """Returns tables on the devices that hold them.

        Args:
          tables: by name, `[rows, dimension]` of the table's dtype.

        Raises:
          ValueError: a table is missing, unknown, or of another shape or dtype.
          PlanError: as `init`.
        """
        arrays = checks.checked_arrays(self.tables, tables)
        for order in self.orders:
            arrays[order.table] = arrays[order.table][order.ids_of(self.tables[order.table].rows)]
        numbers = to_numbers(self.layout, arrays)
        return jax.device_put(numbers, self._shardings)

    @property
    def _shardings(self) -> Any:
        mesh, specs = self._mesh_here(), self._specs
        on_devices = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        hosts = {name: NamedSharding(mesh, spec, memory_kind=HOST_MEMORY) for name, spec in specs.hosts.items()}
        return on_devices._replace(hosts=hosts)

    def unshard(self, arrays: TableArrays) -> dict[str, np.ndarray]:
        """Returns whole tables by name, on the host."""
        tables = to_tables(self.layout, arrays)
        for order in self.orders:
            numbered = tables[self.tables[order.table].name]
            numbered[order.ids_of(len(numbered))] = numbered.copy()
        return tables

    def init_state(self) -> TableArrays:
        """Returns the state of the optimisers before the first step: zeros, on the devices that hold the rows.

        Raises:
          PlanError: as `init`.
        """
        mesh, (_, shapes) = self._mesh_here(), self.shapes()

        def zeros() -> TableArrays:
            return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

        return jax.jit(zeros, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), self._state_specs))()

    def lookup(
        self, arrays: TableArrays, ids: Mapping[str, Any], weights: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """Looks up and pools rows; runs inside `jax.jit` and `jax.grad` as well.

        >>> pooled = plan.lookup(arrays, {"users": ids})["users"]

        In a step that `search` plans, tables and lookups stay as they are here, and take the seconds predicted here.
        The gradient of `arrays` is as large as these. `update` makes a training step without it.

        Args:
          arrays: the tables, from `init` or `shard`.
          ids: by table, `[B, P]` integers, and -1 where an example has fewer; D divides B. `padded_ids` makes them of
            ragged ids.
          weights: by table, `[B, P]`, what each row is multiplied by; a table that is not there has ones.

        Returns:
          Pooled rows by table, `[B, dimension]` float32; zeros for examples without ids.

        Raises:
          ValueError: a table is missing or unknown, shapes do not fit, D does not divide B, or an id is not a row.
            Traced ids, inside `jax.jit`, have no numbers to check: there an id that is not a row adds nothing.
          PlanError: the plan's devices are not here.
        """
        checks.check_shapes(self.shapes(), arrays)
        ids, weights = checks.checked_ids(self.tables, self.devices.num_devices, ids, weights)
        return self._run_lookup(arrays, ids, weights)

    def update(
        self,
        arrays: TableArrays,
        state: TableArrays,
        ids: Mapping[str, Any],
        gradients: Mapping[str, Any],
        *,
        learning_rate: float | jax.Array,
        weights: Mapping[str, Any] | None = None,
        epsilon: float = _EPSILON,
    ) -> tuple[TableArrays, TableArrays]:
        """Makes a step of each table's optimiser, which touches the rows that were looked up and no others.

        A row of gradient g changes by -learning_rate times, where t counts steps,

            rowwise_adagrad   g / (√s + epsilon), s += mean(g²) over the columns
            adagrad           g / (√s + epsilon), s += g²
            adam              √(1 - 0.999ᵗ) / (1 - 0.9ᵗ) · m / (√v + epsilon), m and v the means of g and g²
            sgd               g

        Adam leaves rows as they are whose gradient is 0, or so small that its square is.

        Args:
          arrays: the tables; donate them to `jax.jit` to change them in place.
          state: from `init_state`.
          ids: as for `lookup`.
          gradients: of the pooled rows, by table, `[B, dimension]`.
          learning_rate: of this step.
          weights: as for `lookup`.
          epsilon: positive, against division by zero.

        Returns:
          The tables and the state after the step.

        Raises:
          ValueError, PlanError: as `lookup`; a gradient is missing or of another shape.
        """
        checks.check_shapes(self.shapes(), arrays, state)
        ids, weights = checks.checked_ids(self.tables, self.devices.num_devices, ids, weights)
        gradients = checks.checked_gradients(self.tables, ids, gradients)
        rates = checks.checked_rates(learning_rate, epsilon)
        return self._run_update(arrays, state, ids, weights, gradients, *rates)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mesh: Mesh | AbstractMesh | None = None) -> "TablePlan":
        """Reads a plan that `save` wrote.

        Args:
          path: the file.
          mesh: the devices to run on, with the axes of the plan; None for a plan that is only looked at.

        Raises:
          PlanError: the file is no such plan, is damaged, or was made for other axes than the mesh's.
          OSError: the file cannot be read.
        """
        plan = cls._file.load(path, cls)
        if mesh is not None:
            checked_mesh(mesh, dict(plan.mesh_axes))
        return dataclasses.replace(plan, mesh=mesh)

    def __str__(self) -> str:
        return format_table_plan(self)

    @cached_property
    def _programs(self) -> DevicePrograms:
        return DevicePrograms(self.layout, tuple(name for name, _ in self.mesh_axes))

    @cached_property
    def _each_host(self) -> EachHostPrograms | None:
        """The programs of rows that each host has; None where there are none."""
        if self.layout.each_host is None:
            return None
        names, count = [name for name, _ in self.mesh_axes], axes_across(self.mesh_axes, self.devices.num_hosts)
        return EachHostPrograms(self.layout.each_host, tuple(names[:count]), tuple(names[count:]))

    @property
    def _batch(self) -> PartitionSpec:
        """How examples, and the arrays of all devices, are split: over all axes."""
        return PartitionSpec(tuple(name for name, _ in self.mesh_axes))

    @property
    def _specs(self) -> Any:
        """The sharding of the tables."""
        shards: Any = dict.fromkeys(self.layout.unit_rows, self._batch)
        copies: Any = dict.fromkeys((self.tables[t].name for t in self.layout.copies), PartitionSpec())
        hosts: Any = dict.fromkeys((group.name for group in self.layout.host_rows), self._batch)
        each_host = self.layout.each_host
        own: Any = dict.fromkeys(each_host.unit_rows, self._batch) if each_host else {}
        return TableArrays(shards, copies, hosts, own)

    @property
    def _state_specs(self) -> Any:
        state: Any = {"state": self._batch}
        steps: Any = {"steps": self._batch} if self.layout.counts_steps else {}
        return TableArrays(state | steps, self._specs.copies, {}, state if self.layout.each_host else {})

    @cached_property
    def _run_lookup(self) -> Callable[..., dict[str, jax.Array]]:
        def run(arrays: TableArrays, ids: Any, weights: Any) -> dict[str, jax.Array]:
            def lookup(arrays: TableArrays, ids: Any, weights: Any) -> dict[str, jax.Array]:
                ids = self._renumbered(ids)
                rows = self._programs.lookup(arrays, ids, weights)
                if self._each_host:
                    for name, own in self._each_host.lookup(arrays.each_host, ids, weights).items():
                        rows[name] += own
                return stating_seconds(rows, *self._seconds(batch_size))

            batch_size = next(iter(ids.values())).shape[0]
            return self._mapped(lookup, (self._specs, self._batch, self._batch), self._batch)(arrays, ids, weights)

        return jax.jit(run)

    @cached_property
    def _run_update(self) -> Callable[..., tuple[TableArrays, TableArrays]]:
        def run(arrays: TableArrays, state: TableArrays, ids: Any, *others: Any) -> tuple[TableArrays, TableArrays]:
            def update(
                arrays: TableArrays, state: TableArrays, ids: Any, weights: Any, gradients: Any, rate: Any
            ) -> Any:
                ids = self._renumbered(ids)
                steps = {"steps": state.shards["steps"] + 1} if self.layout.counts_steps else {}
                number = steps["steps"][0] if steps else jnp.zeros((), jnp.float32)
                step = Step(rate, number, others[-1])
                tables, states = self._programs.update(arrays, state, ids, weights, gradients, step)
                states = states._replace(shards=states.shards | steps)
                if self._each_host:
                    own = arrays.each_host, state.each_host["state"]
                    numbers, rows_state = self._each_host.update(*own, ids, weights, gradients, step)
                    tables = tables._replace(each_host=numbers)
                    states = states._replace(each_host={"state": rows_state})
                return stating_seconds((tables, states), self._seconds(batch_size)[1])

            batch_size = next(iter(ids.values())).shape[0]
            specs = (self._specs, self._state_specs, self._batch, self._batch, self._batch, PartitionSpec())
            mapped = self._mapped(update, specs, (self._specs, self._state_specs))
            return mapped(arrays, state, ids, *others[:-1])

        return jax.jit(run, static_argnums=6)

    def _renumbered(self, ids: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns rows by the numbers that pieces count by."""
        orders = {self.tables[order.table].name: order for order in self.orders}
        return {name: orders[name].renumbered(own) if name in orders else own for name, own in ids.items()}

    def _seconds(self, batch_size: int) -> tuple[float, float]:
        """Returns the predicted seconds of looking up `batch_size` examples, and those of the rest of the step."""
        if self.learned is not None:
            return self.learned.of_part(batch_size / self.devices.batch_size)
        return lookup_and_update_s(self.tables, self.pieces, dataclasses.replace(self.devices, batch_size=batch_size))

    def _mapped(self, program: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # `jax.make_mesh` makes axes explicit where nothing is said: arrays would need these shardings in their types.
        mesh = with_automatic_axes(self.mesh) if isinstance(self.mesh, AbstractMesh) else self._mesh_here()
        return jax.shard_map(program, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _mesh_here(self) -> Mesh:
        if not isinstance(self.mesh, Mesh):
            way = "Plan for a `jax.sharding.Mesh`, or load the plan with one: `TablePlan.load(path, mesh)`."
            raise PlanError(f"The plan has no devices to run on. {way}")
        check_fits(self.layout, self.devices)
        return with_automatic_axes(self.mesh)
