"""What a search depends on, as texts by name: compared between processes, and the key of a plan in a store."""

import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from diffshard.plans.base import PlanData
from diffshard.plans.json_values import to_json_values
from diffshard.sharding_search.call import jax_settings
from diffshard.sharding_search.options import Options
from diffshard.sharding_search.program_text import program_text, value_text
from diffshard.sharding_search.tracing import TracedFunction

_PROGRAM = "the program that the function traces to"


def facts_of(options: Options, traced_function: TracedFunction) -> dict[str, str]:
    """Returns the texts on which a plan depends, by names for errors; equal in all processes that ask for the same.

    They have neither a time limit, which the process that searches has for all, nor the mesh's devices.
    """
    hardware = to_json_values(options.hardware)
    return {
        **_arguments(traced_function),
        "`mesh`": f"{dict(options.mesh.shape)} with axes {[str(kind) for kind in options.mesh.axis_types or ()]}",
        **{f"`hardware.{name}`": json.dumps(value, sort_keys=True) for name, value in hardware.items()},
        "`memory_limit_bytes`": f"{options.memory_limit_bytes!r}",
        "`solver`": value_text(options.solver),
        "`key`": key_text(options.key),
        "`executor`": value_text(options.executor),
        "`static_argnums`": value_text((options.static_argnums, options.static_argnames)),
        "`donate_argnums`": value_text((options.donate_argnums, options.donate_argnames)),
        "`logical_axis_rules`": value_text((options.logical_axis_rules, options.metadata_rules)),
        "`check`": options.judged_by,
        **_candidates(options),
        "`remat`": value_text(options.remat),
        "`state`": value_text(options.state),
        "`formats`": value_text(options.formats),
        **_program(traced_function),
    }


def function_digest(traced_function: TracedFunction) -> str:
    """Returns a hash of a traced function with its arguments' types, whatever the mesh and the other options are."""
    return digest_of({**_arguments(traced_function), **_program(traced_function)})


def run_facts(options: Options) -> dict[str, str]:
    """Returns the facts that do not decide the plan, but have to be the same in all processes that run it."""
    devices = options.mesh.devices.flat if isinstance(options.mesh, Mesh) else ()
    return {"the devices of `mesh`": str([device.id for device in devices]), **check_facts(options.checks_numbers)}


def check_facts(checks_numbers: bool) -> dict[str, str]:
    """Returns whether first calls are held against another run, which all processes take part in or none."""
    return {'`check` "numbers"': "given" if checks_numbers else "not given"}


def plan_facts(plan: PlanData) -> dict[str, str]:
    """Returns the facts that have to be the same in all processes that use a plan: all that decide how it runs.

    How long the search took, and what is predicted, may differ.
    """
    arguments = {f"the plan's `{tensor.path}`": str(tensor.partition_spec) for tensor in plan.arguments}
    arrays = [(t.path, t.shape, t.dtype, t.spec, t.on_host) for t in (*plan.arguments, *plan.outputs)]
    operations = [
        (
            *(o.signature, o.operands, o.unreduced, o.results, o.value_specs, o.reductions),
            *(o.format, o.sent_in, o.kept_in, o.exchanged_in),
        )
        for o in plan.operations
    ]
    layout = hashlib.sha256(repr((arrays, operations)).encode()).hexdigest()
    return {
        **arguments,
        "the plan's mesh": str(dict(plan.mesh_axes)),
        "the plan's `executor`": plan.executor,
        "the plan's `static_argnums`": str((plan.static_argnums, plan.static_argnames)),
        "the plan's `donate_argnums`": str((plan.donate_argnums, plan.donate_argnames)),
        "the plan's `logical_axis_rules`": str(plan.logical_axis_rules),
        "the plan's `remat`": str((plan.recomputed, plan.offloaded)),
        "the plan's layout": layout,
    }


def digest_of(facts: Mapping[str, str]) -> str:
    """Returns a hash of texts by name, as letters and digits."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def _candidates(options: Options) -> dict[str, str]:
    """Returns the meshes to choose from, if the mesh is not given."""
    meshes = [(candidate.axes, to_json_values(candidate.hardware.links)) for candidate in options.candidates]
    return {"the meshes of `devices`": json.dumps(meshes, sort_keys=True)} if meshes else {}


def _arguments(traced_function: TracedFunction) -> dict[str, str]:
    """Returns the type of each array among the arguments, and how its sharding is given."""
    call = traced_function.call
    facts = {"the arguments": ", ".join(call.parameters)}
    arrays = zip(call.paths, call.arrays, call.given, call.donated, call.logical_axes, strict=True)
    for path, array, given, donated, axes in arrays:
        text = f"{array.dtype}[{','.join(map(str, array.shape))}]{' (weak)' if array.weak_type else ''}"
        text += "" if given is None else f" given as {getattr(given, 'spec', given)}"
        text += " donated" if donated else ""
        facts[f"`{path}`"] = text if axes is None else f"{text} with the axes {axes}"
    return facts


def _program(traced_function: TracedFunction) -> dict[str, str]:
    """Returns facts about the traced program, and about the versions and settings by which it is traced and planned."""
    return {
        **versions(),
        **setting_facts(),
        "what the results replace in the next call": value_text(tuple(traced_function.graph.feedback)),
        _PROGRAM: program_text(traced_function.jaxpr),
    }


def setting_facts() -> dict[str, str]:
    """Returns the settings of JAX that a program has when it is compiled, and that are not in its text."""
    return {"`jax_default_matmul_precision`": str(jax_settings()[1])}


def versions() -> dict[str, str]:
    """Returns the versions by which functions are traced and planned."""
    import diffshard  # the package, which imports its modules when they are first used

    return {"the version of diffshard": diffshard.__version__, "the version of JAX": jax.__version__}


def key_text(key: jax.Array | int | None) -> str:
    """Returns a random key or seed as text."""
    if key is None or isinstance(key, int):
        return repr(key)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return str(np.asarray(jax.random.key_data(key) if is_typed else key).tolist())
