"""Programs of a few instructions on devices whose kernels take seconds and whose links send a few bytes a second."""

from cost.base import Hardware
from cost.networks import SwitchedHost
from diffshard.checks.kernel_work import AchievableRates
from diffshard.checks.timeline import Timeline, simulate

# Hosts of 4 devices: "model" stays in a host, "data" goes from host to host.
MESH = {"data": 2, "model": 4}
# 100 operations and 10 bytes a second; a device sends 10 bytes a second inside its host and 2 to another one.
RATES = AchievableRates(
    Hardware("toy", {"bfloat16": 100.0, "float32": 50.0}, 10.0, float("inf"), {}),
    SwitchedHost(4, 10.0, 8.0, launch_s=0.0, hop_s=0.0, network_hop_s=0.0),
    host_memory_bytes_per_s=5.0,
)
BY_MODEL = "replica_groups=[2,4]<=[8]"
BY_DATA = "replica_groups=[4,2]<=[2,4]T(1,0)"


def program(*instructions: str, computations: str = "") -> str:
    lines = "\n".join(f"  {instruction}" for instruction in instructions)
    return f"""\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{computations}
ENTRY %main (a: f32[10], b: f32[5]) -> f32[5] {{
  %a = f32[10]{{0}} parameter(0)
  %b = f32[5]{{0}} parameter(1)
{lines}
}}
"""


def played(*instructions: str, computations: str = "") -> Timeline:
    return simulate(program(*instructions, computations=computations), MESH, RATES)
