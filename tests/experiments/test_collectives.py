"""Models of collectives on made-up profiles of which the truth is known, and on those of V100 hosts."""

import gzip
import json

import numpy as np
import pytest

from cost.lines import Line, least_s
from cost.presets import preset
from experiments import collectives
from experiments.collectives import CHOSEN, DESIGNS, Curve, Ring, errors_of, errors_of_rings, rule_between_hosts

HEADER = "num_hosts,gpus_per_host,op,dtype,num_groups,group_size,stride,size,seconds"
TWO_LINES = (Line(7e-5, 1e-9), Line(2e-4, 4e-11))


def write_profiles(path):
    """All-gathers on 8 devices with two protocols: empty calls up to 4 elements, then measured, then extrapolated."""
    sizes = 2.0 ** np.arange(3, 29)
    seconds = [1.7e-5] * 3 + list(least_s(TWO_LINES, 4 * sizes * 7 / 8))
    seconds += [seconds[-1] * 2, seconds[-1] * 4]
    rows = [f"1,8,all_gather,f32,1,8,1,{2**i},{s!r}" for i, s in enumerate(map(float, seconds))]
    path.write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))


def test_profiles_leave_out_extrapolated_and_empty_calls(tmp_path):
    write_profiles(tmp_path / "profiles.csv.gz")
    (curve,) = collectives.read_profiles(tmp_path / "profiles.csv.gz")
    assert (curve.ring, curve.kind) == (Ring(1, 8, 1), "all_gather")
    assert list(curve.elements) == [2**i for i in range(3, 29)]
    assert list(curve.num_bytes) == [2**i for i in range(5, 31)]
    assert [int(b).bit_length() - 1 for b in curve.num_bytes[curve.is_held_out]] == [7, 10, 13, 16, 19, 22, 25, 28]


def test_two_protocols_are_found_and_one_line_is_not_enough_for_them(tmp_path):
    write_profiles(tmp_path / "profiles.csv.gz")
    curves = collectives.read_profiles(tmp_path / "profiles.csv.gz")
    worst = {
        name: max(map(max, errors_of(design, curves).held_out_points.values())) for name, design in DESIGNS.items()
    }
    assert worst[CHOSEN] < 1e-3
    assert worst["table of all sizes by kind"] < 0.2
    assert min(worst[name] for name in worst if name.startswith("line")) > 0.2


def ring_curve(hosts, members, seconds_of):
    num_bytes = 2.0 ** np.arange(10, 30)
    ring = Ring(hosts, members, 8 // members)
    curve = Curve(ring, "all_gather", num_bytes / 4, num_bytes, num_bytes)
    return curve._replace(seconds=seconds_of(ring, curve.sent_bytes))


def test_a_ring_that_was_held_out_follows_the_rule_of_the_others():
    def by_rule(ring, sent):
        return 5e-5 + 2e-5 * (ring.size - ring.hosts) + 1e-4 * (ring.hosts - 1) + sent * (1e-11 + 3e-9 / ring.members)

    shapes = [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 4)]
    curves = [ring_curve(*shape, by_rule) for shape in shapes]
    inside = ring_curve(1, 4, lambda ring, sent: 1e-3 + sent)  # no part of the rule
    errors = errors_of_rings(rule_between_hosts, [*curves, inside])
    assert len(errors.held_out_points) == len(errors.fitted_points) == len(shapes)
    assert max(map(max, errors.held_out_points.values())) < 1e-3

    odd = ring_curve(2, 8, lambda ring, sent: 3 * by_rule(ring, sent))
    errors = errors_of_rings(rule_between_hosts, [*curves, odd])
    assert min(errors.held_out_points[odd.ring, "all_gather"]) == pytest.approx(2 / 3, rel=1e-2)


@pytest.fixture(scope="module")
def v100_curves():
    if not collectives.PROFILES.exists():
        pytest.skip(f"{collectives.PROFILES} is missing")
    return collectives.read_profiles(collectives.PROFILES)


def test_held_out_times_of_v100s_are_within_5_percent_in_the_median(v100_curves):
    some = v100_curves[::4]  # all of them take half a minute
    held_out = {name: np.concatenate([*errors_of(DESIGNS[name], some).held_out_points.values()]) for name in DESIGNS}
    assert np.median(held_out[CHOSEN]) < 0.03
    assert np.quantile(held_out[CHOSEN], 0.9) < 0.12
    assert np.median(held_out[CHOSEN]) < 0.8 * np.median(held_out["line by kind, relative error"])


def test_the_preset_has_the_lines_of_the_profiles(v100_curves):
    inside = [curve for curve in v100_curves if curve.ring == Ring(1, 8, 1)]
    (document,) = collectives.links_document(inside)
    links = preset("v100", {"data": 8}).links
    assert json.loads(json.dumps(document["by_kind"])) == {
        kind: [list(line) for line in links["data"].lines(kind)] for kind in document["by_kind"]
    }
    errors = [
        np.median(np.abs(collectives.preset_seconds(curve) / curve.seconds - 1)[curve.elements >= 1024])
        for curve in v100_curves
    ]
    assert max(errors) < 0.1
    assert np.median(errors) < 0.03


def test_measured_links_are_those_of_hosts_of_8_only():
    measured = preset("v100", {"data": 2, "model": 8}).links["data"]
    assert set(measured.by_kind) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert set(preset("v100", {"data": 2, "model": 4}, devices_per_host=4).links["data"].by_kind) == {"all_to_all"}
    assert set(preset("v100", {"data": 3, "model": 8}).links["data"].by_kind) == {"all_to_all"}
    (*_, largest) = measured.lines("all_gather")
    assert 1 / largest.s_per_byte == pytest.approx(2.6e9 / 8, rel=0.2)  # an eighth of the host's network


def test_main_prints_every_table_and_writes_lines(capsys, tmp_path):
    path = tmp_path / "profiles.csv.gz"
    write_profiles(path)
    rows = gzip.decompress(path.read_bytes()).decode().splitlines()[1:]
    rows += [row.replace("1,8,all_gather,f32,1,8,1,", f"{h},8,all_gather,f32,8,{h},8,") for row in rows for h in (2, 4)]
    path.write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))
    collectives.main(["--profiles", str(path), "--write", str(tmp_path / "links.json")])
    out = capsys.readouterr().out
    for expected in ("every third size held out", CHOSEN, "one whole ring held out", "Held-out points by curve"):
        assert expected in out
    links = json.loads((tmp_path / "links.json").read_text())
    assert [(link["size"], link["stride"]) for link in links] == [(8, 1), (2, 8), (4, 8)]
    np.testing.assert_allclose(links[0]["by_kind"]["all_gather"], TWO_LINES, rtol=1e-3)
    with pytest.raises(SystemExit):
        collectives.main(["--profiles", str(tmp_path / "none")])
    assert "`--profiles`" in capsys.readouterr().err
