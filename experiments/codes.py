"""Sums and kept arrays as codes: what they do to the loss of a training, and the time of compiled programs with them.

    python -m experiments.codes [--model gpt] [--steps 200] [--seeds 2] [--devices 8]
    python -m experiments.codes --kinds --products float8 float8_delayed
    python -m experiments.codes --compile decoder --mesh 4x8 [--links 0.25] [--exposed-share 0.8] [--formats int8]

The first trains a small model from the start on one device, which sums in as many parts as devices would, with the sums
of all gradients in each format, without error feedback and with it, with all arrays of the forward pass kept in it, and
with all exchanges of activations that there could be in it.
The second trains with all products in each format. The third compiles a model of `experiments.timeline_models` for
H100s (the extra `gpu-compile`) with sums as they are, and in each format wherever that gains, whatever the loss says,
for links between hosts of some share of the preset's bandwidth; and plays the programs back. `experiments.remat`
compiles plans that keep arrays as codes under memory limits.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import optax

import diffshard
from diffshard.checks.kernel_work import H100_HOST, achievable_rates
from diffshard.checks.timeline import simulate
from diffshard.plans.printing import format_s
from diffshard.sharding_search.format_rules import exchange_rules
from diffshard.sharding_search.number_formats import GRADIENTS, KEPT, ProductGroup
from experiments.format_models import MODELS, Setting
from experiments.formats import faster
from experiments.host_devices import parse_mesh
from experiments.models.model import abstract_arguments
from experiments.tables import print_table
from experiments.targets import MESHES
from experiments.timeline_models import CASES
from search_spaces.sharding.codes import CODES, FEEDBACK
from search_spaces.sharding.product_formats import FORMATS as PRODUCTS


def within_modules(group: ProductGroup, word: str) -> ProductGroup:
    """Returns the part of a group that is in modules whose names have a word."""
    return group._replace(vertices=tuple(vertex for vertex in group.vertices if word in vertex.scope))


def training_table(
    setting: Setting,
    names: Sequence[str],
    kinds: Sequence[str],
    products: Sequence[str],
    steps: int,
    seeds: int,
    num_devices: int,
    within: str = "",
) -> None:
    """Trains with everything exact, with each kind of codes in each format, and with all products in each format.

    Args:
      within: a word of the names of modules; only their exchanges are codes.
    """
    sums = [*names, *(name + FEEDBACK for name in names)] if "sums" in kinds else []
    kept, exchanges = (names if kind in kinds else [] for kind in ("kept", "exchanges"))
    losses = setting.losses(
        steps, seeds, num_devices, products=products, sums=sums, kept=kept, exchanges=exchanges
    )  # fmt: skip
    groups = losses.groups.values()
    chosen = {group.name: group.members for group in groups if group.place in (GRADIENTS, KEPT)}
    members = {"exact": frozenset(), **chosen, **exchange_rules([within_modules(group, within) for group in groups])}
    for name in products:
        own = (group.members for group in groups if group.kind == "product" and group.format == name)
        members[f"all products in {name}"] = frozenset().union(*own)
    rows, exact = [], []
    for name, keys in members.items():
        late = losses.late_losses(keys)
        exact = exact or late
        rows.append([name, str(len(keys)), *(f"{loss - other:+.4f}" for loss, other in zip(late, exact, strict=True))])
        print(*rows[-1], sep="  ", flush=True)
    columns = ["codes", "operations", *(f"seed {seed}" for seed in range(seeds))]
    print_table(f"a {setting.small.name} after {steps} steps, sums of {num_devices} devices", columns, rows)
    print("exact losses:", *(f"{loss:.4f}" for loss in exact))


def compiled_table(
    name: str,
    mesh_text: str,
    sizes: str,
    links: Sequence[float],
    exposed_share: float | None,
    formats: Sequence[str],
    limit_s: float,
) -> None:
    """Compiles a model with sums as they are and in each format, and prints predictions and timelines."""
    case, rows = CASES[name], []
    model = case.make(batch=case.batches[mesh_text], **(case.full if sizes == "full" else case.small))
    mesh = MESHES["h100"](parse_mesh(mesh_text))
    preset = diffshard.preset("h100", dict(mesh.shape))
    for share in links:
        own = {axis: faster(link, share) if link.num_hosts > 1 else link for axis, link in preset.links.items()}
        exposed = preset.exposed_share if exposed_share is None else exposed_share
        hardware = dataclasses.replace(preset, links=own, exposed_share=exposed)
        network = share * H100_HOST.network_bytes_per_s
        rates = achievable_rates(hardware, host=dataclasses.replace(H100_HOST, network_bytes_per_s=network))
        for label in ("exact", *formats):
            any_loss = {} if label == "exact" else {f"{GRADIENTS} in {label}": 0.0}
            step = diffshard.search(
                model.step, mesh, hardware=hardware, time_limit_s=limit_s, donate_argnums=0, progress="none",
                formats=diffshard.formats.Formats(1.0, increases=any_loss, products=(), sums=tuple(formats)),
            )  # fmt: skip
            plan = step.plan(*abstract_arguments(model))
            hlo = step.lower(*abstract_arguments(model)).compile().as_text() or ""
            timeline = simulate(hlo, mesh.shape, rates)
            num_sums = sum(bool(operation.sent_in) for operation in plan.operations)
            seconds = [format_s(s) for s in (plan.step_s, plan.lower_bound_s, timeline.step_s)]
            rows.append([f"{share:g}", label, *seconds, str(num_sums)])
            print(*rows[-1], *timeline.notes, sep="  ", flush=True)
    columns = ["links between hosts", "gradients in", "predicted", "bound", "timeline", "sums as codes"]
    print_table(f"{name} on {mesh_text} H100s, compiled", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--devices", type=int, default=8, help="that share each sum")
    parser.add_argument("--kinds", nargs="*", choices=("sums", "kept", "exchanges"), default=["sums", "kept"])
    parser.add_argument("--within", default="", help="exchanges in modules with this word in their names only")
    parser.add_argument("--products", nargs="*", choices=PRODUCTS, default=[], help="formats of all products")
    parser.add_argument(
        "--sgd", type=float, help="train the GPT by SGD with momentum 0.9 at this step size, not by adamw"
    )
    parser.add_argument("--sizes", choices=("full", "small"), default="full")
    parser.add_argument("--compile", choices=CASES, help="compile this model instead")
    parser.add_argument("--mesh", default="4x8")
    parser.add_argument("--links", type=float, nargs="+", default=[1.0, 0.25], help="shares of the preset's bandwidth")
    parser.add_argument("--exposed-share", type=float, help="of collectives beside arithmetic; the preset's by default")
    parser.add_argument("--formats", nargs="+", choices=CODES, default=["int8"])
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of the solver for each plan")
    options = parser.parse_args(argv)
    if options.compile:
        sizes = options.mesh, options.sizes
        compiled_table(
            options.compile, *sizes, options.links, options.exposed_share, options.formats, options.time_limit
        )
    else:
        setting = Setting.of(options.model, options.sizes)
        if options.sgd is not None:
            setting = setting.with_small(optimizer=optax.sgd(options.sgd, momentum=0.9))
        kinds = options.kinds, options.products
        training = options.steps, options.seeds, options.devices
        training_table(setting, options.formats, *kinds, *training, options.within)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
