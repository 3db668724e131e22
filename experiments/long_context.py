"""Long sequences: the found plan beside what baselines do with the sequence, predicted and compiled for H100s.

    python -m experiments.long_context [--sequence 131072] [--batch 4] [--mesh 4x8] [--layers 2] [--no-timeline]

A Llama-like decoder with cuDNN's attention is planned for H100s that need not be there (the extra `gpu-compile`). A
baseline's row is the best plan with its shardings of state and batch, its rules for activations, and attention split in
its way only. All run as programs for each device; the timeline plays the compiled programs back, with cuDNN's
attention by the law of measured kernels. Its scratch memory is unknown without a GPU, so the compiled peak lacks it.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import diffshard
from diffshard.baselines.base import DoesNotApplyError
from diffshard.checks.kernel_work import achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.checks.verify import predicted_sent_bytes
from experiments import hand_plans
from experiments.host_devices import parse_mesh
from experiments.models import long_decoder
from experiments.models.model import Model, abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from search_spaces.sharding import shardy
from search_spaces.sharding.base import Rule
from search_spaces.sharding.custom_calls import operations
from search_spaces.sharding.custom_calls.cudnn import BACKWARD, FORWARD, planned_without_cudnn, rule_of_attention
from search_spaces.sharding.custom_calls.ring import sequence_rules

SIZES: dict[str, dict[str, int]] = {
    "full": {"width": 4096, "heads": 32, "key_value_heads": 8, "hidden": 14336, "vocabulary": 32768},
    "small": {"width": 64, "heads": 8, "key_value_heads": 4, "hidden": 128, "vocabulary": 256},
}
COLUMNS = (
    "plan", "attention is split by", "predicted ms", "computing", "waiting", "sent GB", "peak GiB", "timeline ms",
    "its waiting", "compiled GiB",
)  # fmt: skip
FOUND = "found"
_GIB = 2**30


class ByHand(NamedTuple):
    """How a baseline runs a model of long sequences.

    Attributes:
      state: the baseline in `experiments.hand_plans` that splits parameters and their optimiser's state.
      splits_sequence: whether activations are split over their sequence along the inner axis.
      attention: a key of `ATTENTION`.
    """

    state: str
    splits_sequence: bool
    attention: str


BASELINES: dict[str, ByHand | None] = {
    FOUND: None,
    "fsdp": ByHand("fsdp", False, "heads"),
    "megatron": ByHand("megatron", False, "heads"),
    "megatron sequence": ByHand("megatron sequence", False, "heads"),
    "megatron fsdp": ByHand("megatron fsdp", False, "heads"),
    "fsdp, whole keys": ByHand("fsdp", True, "whole keys"),
    "fsdp, all-to-all": ByHand("fsdp", True, "heads"),
    "fsdp, ring": ByHand("fsdp", True, "ring"),
    "fsdp, ring and all-to-all": ByHand("fsdp", True, "ring and heads"),
}


def _without_heads(equation: core.JaxprEqn, number: int) -> Rule:
    """Returns a rule for parts of a sequence by which heads stay whole."""
    rules = sequence_rules(equation)
    if not rules:
        return rule_of_attention(equation)
    rule = rules[number]
    heads = 1 if equation.params["layout"] else 2
    return replace(rule, need_replication=rule.need_replication | {*rule.operands[0][heads]})


ATTENTION: dict[str, Any] = {
    "heads": rule_of_attention,
    "ring": functools.partial(_without_heads, number=0),
    "ring and heads": lambda equation: (*sequence_rules(equation), rule_of_attention(equation))[0],
    "whole keys": functools.partial(_without_heads, number=1),
}
"""The only rule of attention, by what splits it beside the batch."""


@contextlib.contextmanager
def attention_split_by(name: str | None) -> Iterator[None]:
    """Offers only one way to split attention inside a `with`; None offers all."""
    if name is None:
        yield
        return
    only = {
        p: operations.CUSTOM_CALLS[p]._replace(rule=ATTENTION[name], more_rules=lambda e: ())
        for p in (FORWARD, BACKWARD)
    }
    with mock.patch.dict(operations.CUSTOM_CALLS, only), mock.patch.dict(shardy._cache, clear=True):
        yield


def search_of(
    by_hand: ByHand | None, model: Model, mesh: Mesh, hardware: diffshard.Hardware, time_limit_s: float
) -> Any:
    """Returns the search for a plan, free or with a baseline's shardings and rules.

    Raises:
      DoesNotApplyError: the baseline does not apply to the model's batch.
    """
    options: dict[str, Any] = {"time_limit_s": time_limit_s, "donate_argnums": 0, "executor": "program"}
    if by_hand is not None:
        state, batch = abstract_arguments(model)
        if by_hand.splits_sequence:  # so that FSDP splits the state over all devices, whatever the batch
            batch = jax.ShapeDtypeStruct((mesh.size, *batch.shape[1:]), batch.dtype)
        hand_plan = hand_plans.HAND_PLANS[by_hand.state](state, batch, mesh)
        outer, inner = mesh.axis_names[:-1], mesh.axis_names[-1]
        rules: dict[str, Any] = dict(hand_plan.rules)
        batch_sharding = hand_plan.batch
        if by_hand.splits_sequence:
            divides = abstract_arguments(model)[1].shape[0] % (mesh.size // mesh.shape[inner]) == 0
            rules = {"batch": outer, "sequence": (inner,)} if divides else {"sequence": mesh.axis_names}
            batch_sharding = NamedSharding(mesh, P(outer) if divides else P())
        options |= {"in_shardings": (hand_plan.state, batch_sharding), "logical_axis_rules": tuple(rules.items())}
    return diffshard.search(model.step, mesh, hardware=hardware, **options)


def row_of(
    name: str, model: Model, mesh: Mesh, hardware: diffshard.Hardware, options: argparse.Namespace
) -> tuple[str, ...]:
    """Plans, compiles and plays one plan back; returns the cells of its row."""
    by_hand = BASELINES[name]
    args = abstract_arguments(model)
    try:
        with attention_split_by(by_hand.attention if by_hand else None):
            plan = search_of(by_hand, model, mesh, hardware, options.time_limit).plan(*args)
    except DoesNotApplyError as error:
        print(f"{name} does not apply: {error}", flush=True)
        return (name, "does not apply", *["-"] * 8)
    except diffshard.InfeasibleError:
        return (name, "does not fit", *["-"] * 8)
    sent_bytes = predicted_sent_bytes(plan.collectives, mesh.shape)
    times = (f"{1e3 * s:.1f}" for s in (plan.step_s, plan.compute_s, plan.step_s - plan.compute_s))
    cells = [name, attention_of(plan), *times, f"{sent_bytes / 1e9:.2f}", f"{plan.peak_bytes / _GIB:.2f}"]
    if options.timeline:
        start = time.perf_counter()
        compiled = plan.apply(model.step).lower(*args).compile()
        print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
        timeline = simulate(compiled.as_text() or "", mesh.shape, achievable_rates(hardware))
        memory = compiled.memory_analysis()
        peak_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        cells += [f"{1e3 * s:.1f}" for s in (timeline.step_s, sum(timeline.waited_s.values()))]
        cells.append(f"{(peak_bytes + memory.temp_size_in_bytes) / _GIB:.2f}")
    else:
        cells += ["-"] * 3
    return tuple(cells)


def attention_of(plan: diffshard.Plan) -> str:
    """Says how a plan splits queries in its calls of attention, and what becomes of their keys."""
    texts = []
    for operation in plan.operations:
        if not operation.signature.startswith("dot_product_attention"):
            continue
        (batch, sequence, heads, _), (_, key_sequence, _, _) = operation.operands[:2]
        keys = "ring" if key_sequence else "whole keys"
        named = (("batch", batch), (f"sequence ({keys})", sequence), ("heads", heads))
        texts.append(", ".join(f"{what}: {'+'.join(axes)}" for what, axes in named if axes) or "nothing")
    return "; ".join(f"{texts.count(text)}x {text}" for text in dict.fromkeys(texts))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=131072, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--mesh", default="4x8", help="data x model, in hosts of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--plans", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--target", choices=MESHES, default="h100", help="what the programs are compiled for")
    parser.add_argument("--timeline", action=argparse.BooleanOptionalAction, default=True, help="compile the plans")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    mesh = MESHES[options.target](parse_mesh(options.mesh))
    hardware = diffshard.preset("h100", dict(mesh.shape))
    with planned_without_cudnn():
        sizes: dict[str, Any] = {"layers": options.layers, "sequence": options.sequence, **SIZES[options.sizes]}
        model = long_decoder.make(batch=options.batch, **sizes)
        rows = []
        for name in options.plans:
            rows.append(row_of(name, model, mesh, hardware, options))
            print(*rows[-1], sep=" | ", flush=True)
    title = f"{model.name}, {options.batch} sequences of {options.sequence} tokens, {options.mesh}"
    print_table(title, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
