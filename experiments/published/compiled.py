"""How long a published run of JAX waits for its links, by the program that XLA makes of it.

Such a run leaves it to XLA which collectives there are, which are combined into one, and what runs beside them. XLA's
compiler does not need the GPUs, and the runs' scripts say which options they give to it. So the step is compiled for as
many GPUs as the run had, with these options, and played back on the run's network.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cost.networks import SwitchedHost
from diffshard.checks.kernel_work import AchievableRates
from diffshard.checks.targets import A100, H100, gpu_mesh
from diffshard.checks.timeline import simulate
from experiments.published.hardware import device_of, hardware_of
from experiments.published.prediction import Prediction, predict, state_specs, step_of
from experiments.published.runs import Run
from search_spaces.sharding.custom_calls.cudnn import planned_without_cudnn


def predict_compiled(run: Run) -> Prediction:
    """Predicts a run by measured kernels; a run of JAX waits as its compiled program does.

    Raises:
      RuntimeError: the extra `gpu-compile` is missing.
    """
    prediction = predict(run, hardware_of(run))
    if run.xla_options is None:
        return prediction
    parts = {**prediction.parts, "links": sum(waits_s(run).values())}
    return dataclasses.replace(prediction, seconds=sum(parts.values()), parts=parts)


def waits_s(run: Run) -> Mapping[tuple[str, str], float]:
    """Compiles a run's step, and returns the seconds that its kernels wait, by kind of collective and mesh axes."""
    device, network = device_of(run)
    assert isinstance(network, SwitchedHost)
    return simulate(compiled_text(run), run.mesh_axes, AchievableRates(device, network)).waited_s


def compiled_text(run: Run) -> str:
    """Returns the scheduled program that XLA makes of a run's step with the run's options."""
    target = gpu_mesh(run.mesh_axes, A100 if run.device.startswith("a100") else H100)
    mesh = Mesh(target.devices, target.axis_names, axis_types=(AxisType.Auto,) * len(target.axis_names))
    with planned_without_cudnn():
        step, state, tokens = step_of(run, run.split, mesh, is_unrolled=not run.is_scanned)
        specs = state_specs(run, run.split, state[1])
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        batch = NamedSharding(mesh, P(run.split.batch))
        jitted = jax.jit(step, in_shardings=(shardings, batch), out_shardings=(shardings, None), donate_argnums=0)
        lowered = jitted.lower(state, tokens)
    options: Any = dict(run.xla_options or {})
    return lowered.compile(compiler_options=options).as_text() or ""
