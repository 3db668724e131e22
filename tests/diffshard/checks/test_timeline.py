"""Schedules worked by hand: kernels of a few seconds, links of a few bytes a second."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffshard.checks.kernel_work import BETWEEN_HOSTS, HOST_MEMORY, INSIDE_HOST
from diffshard.checks.timeline import COMPUTE, simulate, unroll
from diffshard.checks.timeline_lanes import write_perfetto
from tests.diffshard.checks.small_schedules import BY_DATA, BY_MODEL, MESH, RATES, played, program

ROOT = Path(__file__).resolve().parents[3]
# 160 bytes gathered from 4 devices: each sends 120, in 12 s. 20 bytes read and written: 4 s.
GATHER = f"%g = (f32[10]{{0}}, f32[40]{{0}}) all-gather-start(%a), {BY_MODEL}, dimensions={{0}}"
GATHERED = "%gathered = f32[40]{0} all-gather-done(%g)"
COPY = "%copy = f32[5]{0} copy(%b)"


def test_a_collective_runs_beside_a_kernel_and_its_done_waits_for_the_rest():
    timeline = played(GATHER, COPY, GATHERED, "ROOT %last = f32[5]{0} negate(%copy)")
    assert timeline.step_s == 12 + 4
    assert timeline.busy_s == {COMPUTE: 8.0, INSIDE_HOST: 12.0}
    assert timeline.waited_s == {("all_gather", "model"): 8.0}
    found = [(span.name, span.resource, span.start_s, span.end_s) for span in timeline.spans]
    assert found == [("g", INSIDE_HOST, 0, 12), ("copy", COMPUTE, 0, 4), ("last", COMPUTE, 12, 16)]


def test_a_collective_that_nobody_waits_for_still_belongs_to_the_step():
    assert played(GATHER, COPY).step_s == 12


@pytest.mark.parametrize(
    "collective",
    [
        f"%gathered = f32[40]{{0}} all-gather(%a), {BY_MODEL}, dimensions={{0}}",
        f'{GATHER}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}',
    ],
)
def test_a_synchronous_collective_holds_the_compute_stream(collective: str):
    timeline = played(collective, COPY)
    assert timeline.step_s == 12 + 4
    assert timeline.waited_s == {("all_gather", "model"): 12.0}


def test_collectives_queue_on_one_link_and_run_together_on_two():
    # An all-reduce of 20 bytes over 4 devices sends 30, over 2 devices 20: 3 s inside the host, 10 s between hosts.
    inside = f"%r = f32[5]{{0}} all-reduce-start(%b), {BY_MODEL}, to_apply=%add"
    between = f"%s = f32[5]{{0}} all-reduce-start(%b), {BY_DATA}, to_apply=%add"
    dones = ("%r.done = f32[5]{0} all-reduce-done(%r)", "%s.done = f32[5]{0} all-reduce-done(%s)")
    together = played(GATHER, between, GATHERED, dones[1])
    assert together.step_s == 12
    assert together.waited_s == {("all_gather", "model"): 12.0}
    queued = played(GATHER, inside, GATHERED, dones[0])
    assert queued.step_s == 12 + 3
    assert queued.waited_s == {("all_gather", "model"): 12.0, ("all_reduce", "model"): 3.0}


def test_a_ring_over_several_devices_of_several_hosts_takes_both_links():
    # 7/8 of 320 bytes, at the 8 bytes a second that four devices of a host send to the other one.
    timeline = played("%all = f32[80]{0} all-gather(%a), replica_groups=[1,8]<=[8], dimensions={0}")
    assert timeline.step_s == 280 / 8
    assert timeline.busy_s == {INSIDE_HOST: 35.0, BETWEEN_HOSTS: 35.0}
    assert timeline.waited_s == {("all_gather", "data+model"): 35.0}


def test_a_collective_on_two_links_waits_for_both():
    # The link between hosts is busy for 10 s when the ring over both links, of 35 s, could start.
    between = f"%s = f32[5]{{0}} all-reduce-start(%b), {BY_DATA}, to_apply=%add"
    ring = "%all = (f32[10]{0}, f32[80]{0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}"
    assert played(between, ring).step_s == 10 + 35


def test_what_has_no_price_is_named():
    sent = "%s = (f32[5]{0}, u32[], token[]) send(%b, %token), channel_id=1"
    assert played(sent, COPY).notes == ("send is not priced",)


def test_kernels_that_are_wrapped_run_on_the_compute_stream():
    wrapped = """\
%copied (p: f32[5]) -> f32[5] {
  %p = f32[5]{0} parameter(0)
  ROOT %twice = f32[5]{0} copy(%p)
}
"""
    start = "%s = ((f32[5]{0}), f32[5]{0}, s32[]) async-start(%b), calls=%copied"
    assert played(start, "%d = f32[5]{0} async-done(%s)", COPY, computations=wrapped).step_s == 4 + 4


def test_a_conditional_takes_the_branch_whose_links_are_busy_longest():
    branches = f"""\
%sending (p: f32[10]) -> f32[5] {{
  %a = f32[10]{{0}} parameter(0)
  {GATHER}
}}

%computing (p: f32[5]) -> f32[5] {{
  %b = f32[5]{{0}} parameter(0)
  {COPY}
}}
"""
    # One starts a gather of 12 s and ends at once, the other takes 4 s.
    conditional = "%c = f32[5]{0} conditional(%i, %a, %b), branch_computations={%computing, %sending}"
    assert played(conditional, computations=branches).step_s == 12


WRAPPED = f"""\
%wrapped (p: f32[40]) -> f32[10] {{
  %p = f32[40]{{0}} parameter(0)
  ROOT %rs = f32[10]{{0}} reduce-scatter(%p), {BY_MODEL}, dimensions={{0}}, to_apply=%add
}}
"""


def test_a_wrapped_reduce_scatter_is_asynchronous():
    timeline = played(
        "%s = ((f32[40]{0}), f32[10]{0}, s32[]) async-start(%a), calls=%wrapped",
        COPY,
        "%u = ((f32[40]{0}), f32[10]{0}, s32[]) async-update(%s)",
        "%d = f32[10]{0} async-done(%u)",
        computations=WRAPPED,
    )
    assert timeline.step_s == 12
    assert timeline.waited_s == {("reduce_scatter", "model"): 8.0}


def test_a_permute_is_as_slow_as_its_slowest_pair_and_a_group_of_one_costs_nothing():
    permute = "%p = f32[5]{0} collective-permute(%b), source_target_pairs="
    assert played(permute + "{{0,1},{1,0}}").step_s == 20 / 10
    assert played(permute + "{{0,1},{3,4}}").step_s == 20 / 2
    assert played(permute + "{{0,0},{1,1}}").step_s == 0
    assert played("%r = f32[5]{0} all-reduce(%b), replica_groups=[8,1]<=[8], to_apply=%add").step_s == 0


def test_a_copy_to_host_memory_runs_beside_kernels():
    timeline = played(
        "%c = (f32[5]{0:S(5)}, f32[5]{0}, u32[]) copy-start(%b)", COPY, "%d = f32[5]{0:S(5)} copy-done(%c)"
    )
    # Both take 4 s.
    assert timeline.step_s == 20 / 5
    assert timeline.busy_s == {COMPUTE: 4.0, HOST_MEMORY: 4.0}


# A trip: the gather of 12 s, started after a kernel of 4 s that runs beside the gather of the trip before.
LOOP = f"""\
%body (p: (f32[5], f32[5], f32[5], f32[5], f32[5], f32[5], (f32[5], f32[10]))) -> f32[5] {{
  %p = (f32[5]{{0}}, f32[5]{{0}}, f32[5]{{0}}, f32[5]{{0}}, f32[5]{{0}}, /*index=5*/f32[5]{{0}}, /*index=6*/(f32[5]{{0}}, f32[10]{{0}})) parameter(0)
  %b = f32[5]{{0}} get-tuple-element(%p), index=0
  {COPY}
  {GATHER}
  %second = f32[5]{{0}} negate(%copy)
  ROOT %t = (f32[5]{{0}}, f32[5]{{0}}) tuple(%second, /*index=1*/%copy)
}}

%condition (p: f32[5]) -> pred[] {{
  ROOT %p = pred[] parameter(0)
}}
"""  # noqa: E501 instructions are lines
WHILE = (
    "%w = (f32[5]{0}, f32[5]{0}, f32[5]{0}, f32[5]{0}, f32[5]{0}, /*index=5*/f32[5]{0}, /*index=6*/(f32[5]{0}, "
    "f32[10]{0})) while(%init), condition=%condition, body=%body"
)
TRIPS = 'backend_config={"known_trip_count":{"n":"1000"}}'


def test_a_loop_runs_as_often_as_it_is_long_and_keeps_its_links_busy():
    # The stream needs 8 s for a trip and waits for nothing, the link 12: it starts at 4 and is busy from then on.
    timeline = played(f"{WHILE}, {TRIPS}", computations=LOOP)
    assert timeline.step_s == pytest.approx(4 + 12_000)
    assert timeline.busy_s == {COMPUTE: pytest.approx(8_000), INSIDE_HOST: pytest.approx(12_000)}
    assert timeline.notes == ()


def test_a_loop_in_a_steady_state_is_played_once_and_waits_in_every_trip():
    waiting = LOOP.replace("ROOT %t", f"{GATHERED}\n  ROOT %t")
    timeline = played(f"{WHILE}, {TRIPS}", computations=waiting)
    assert timeline.step_s == pytest.approx(16_000)
    assert timeline.waited_s == {("all_gather", "model"): pytest.approx(8_000)}
    assert len(timeline.spans) == 3 + 1
    assert timeline.spans[-1].name == "999 more trips of w"
    assert (timeline.spans[-1].start_s, timeline.spans[-1].end_s) == pytest.approx((16, 16_000))


def test_a_link_that_is_busy_before_a_loop_delays_its_first_trip_only():
    # The link is taken for 24 s. The first trip's gather ends at 36 and the stream has waited 28 of them.
    waiting = LOOP.replace("ROOT %t", f"{GATHERED}\n  ROOT %t")
    gather = "= (f32[10]{0}, f32[40]{0}) all-gather-start(%a)," + BY_MODEL
    timeline = played(f"%x {gather}", f"%y {gather}", f"{WHILE}, {TRIPS}", computations=waiting)
    assert timeline.step_s == pytest.approx(36 + 999 * 16)


REDUCE = f"%r = f32[5]{{0}} all-reduce-start(%b), {BY_DATA}, to_apply=%add"
REDUCED = "%reduced = f32[5]{0} all-reduce-done(%r)"


@pytest.mark.parametrize("busy", [0, 7])
@pytest.mark.parametrize(
    "body",
    [
        (GATHER, COPY, GATHERED),
        (GATHER, REDUCE, COPY, REDUCED),
        (REDUCE, COPY, GATHER, GATHERED, REDUCED),
        (COPY,),
        (REDUCE, COPY),
    ],
)
def test_a_loop_takes_as_long_as_its_trips_written_out(busy: int, body: tuple[str, ...]):
    lines = "\n  ".join(("%a = f32[10]{0} parameter(0)", "%b = f32[5]{0} parameter(1)", *body))
    computations = f"%body (a: f32[10], b: f32[5]) -> f32[5] {{\n  {lines}\n}}\n"
    before = [f"%x{i} = f32[5]{{0}} all-reduce-start(%b), {BY_DATA}, to_apply=%add" for i in range(busy)]
    loop = '%w = f32[5]{0} while(%b), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"50"}}'
    calls = [f"%c{i} = f32[5]{{0}} call(%a, %b), to_apply=%body" for i in range(50)]
    looped = played(*before, loop, COPY, computations=computations)
    written_out = played(*before, *calls, COPY, computations=computations)
    assert looped.step_s == pytest.approx(written_out.step_s)
    assert looped.busy_s == pytest.approx(written_out.busy_s)
    assert looped.waited_s == pytest.approx(written_out.waited_s)
    assert len(looped.spans) < len(written_out.spans)
    # Written out, every trip is where it is in the program without the loop.
    found, expected = (
        [(span.name, span.resource, span.transfer, span.start_s, span.end_s) for span in unroll(spans)]
        for spans in (looped.spans, written_out.spans)
    )
    assert [span[:3] for span in found] == [span[:3] for span in expected]
    assert np.array([span[3:] for span in found]) == pytest.approx(np.array([span[3:] for span in expected]))


def test_loops_in_loops_are_written_out():
    inner = f"%body (a: f32[10], b: f32[5]) -> f32[5] {{\n  %b = f32[5]{{0}} parameter(1)\n  {COPY}\n}}\n"
    loop = '%w = f32[5]{0} while(%b), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    outer = f"%outer (b: f32[5]) -> f32[5] {{\n  %b = f32[5]{{0}} parameter(0)\n  {loop}\n}}\n"
    around = '%o = f32[5]{0} while(%b), condition=%add, body=%outer, backend_config={"known_trip_count":{"n":"3"}}'
    timeline = played(around, computations=inner + outer)
    spans = list(unroll(timeline.spans))
    assert [span.name for span in spans] == ["copy"] * 15
    assert [span.start_s for span in spans] == pytest.approx([4.0 * i for i in range(15)])
    assert [span.name for span in unroll(timeline.spans, max_spans=3)][-1] == "2 more trips of o"


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    timeline = played(WHILE, computations=LOOP)
    assert timeline.step_s == 4 + 12
    assert timeline.notes == ("loop 'w' has an unknown length and is priced as one trip",)


def test_a_conditional_takes_its_dearest_branch():
    branches = """\
%cheap (p: f32[5]) -> f32[5] {
  ROOT %p = f32[5]{0} parameter(0)
}

%dear (p: f32[5]) -> f32[5] {
  %p = f32[5]{0} parameter(0)
  ROOT %twice = f32[5]{0} copy(%p)
}
"""
    conditional = "%c = f32[5]{0} conditional(%i, %b, %b), branch_computations={%dear, %cheap}"
    timeline = played(conditional, COPY, computations=branches)
    assert timeline.step_s == 4 + 4
    assert [span.name for span in timeline.spans] == ["twice", "copy"]


def test_a_trace_for_perfetto(tmp_path: Path):
    path = tmp_path / "trace.json"
    gather = GATHER + ', metadata={op_name="jit(step)/dot_general"}'
    write_perfetto(played(gather, COPY, GATHERED), path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[s["tid"]], s["name"], s["ts"], s["dur"]) for s in spans] == [
        (INSIDE_HOST, "g", 0, 12e6),
        (COMPUTE, "copy", 0, 4e6),
    ]
    assert spans[0]["args"]["op_name"] == "jit(step)/dot_general"
    assert len({(event["pid"], event["ph"] == "M", event["tid"]) for event in events}) == 2 * len(names)
    assert len({event["pid"] for event in events}) == 1  # rows are named for each process
    assert list(tmp_path.iterdir()) == [path]


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match=r"`hlo`.*is_scheduled"):
        simulate(program(COPY).replace("is_scheduled=true, ", ""), MESH, RATES)


SCRIPT = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from cost.presets import preset
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.targets import gpu_mesh
from diffshard.checks.timeline import simulate

mesh = gpu_mesh({"data": 2, "model": 4})
place = lambda *specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
layer = lambda x, w: (jnp.tanh(x @ w), None)
step = jax.jit(lambda x, w: lax.scan(layer, x, w)[0], in_shardings=place(P(("data", "model")), P(None, "model")),
               out_shardings=place(P(("data", "model")))[0])
shapes = ((8192, 4096), (6, 4096, 4096))
compiled = step.lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).compile()
timeline = simulate(compiled.as_text(), mesh.shape, achievable_rates(preset("h100", dict(mesh.shape))))
products_s = 6 * 2 * 1024 * 4096 * 4096 / (0.7 * 989e12)
assert products_s <= timeline.busy_s["compute"] <= 2 * products_s, (products_s, timeline)
assert hlo_collectives(compiled.as_text(), mesh.shape)
assert timeline.busy_s["links inside a host"] > 0
assert timeline.step_s >= timeline.busy_s["compute"] + sum(timeline.waited_s.values()) - 1e-9
assert timeline.notes == (), timeline.notes
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra gpu-compile")
def test_a_program_for_h100s():
    # A process of its own: JAX looks for plugins once, when its first backend starts.
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
