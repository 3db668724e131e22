"""The contest's format: what is read, what is refused, and that writing and reading are inverse."""

import gzip
import json

import numpy as np
import pytest

from cost.base import FORBIDDEN
from cost.evaluation import evaluate
from diffshard.solving import contest
from diffshard.solving.solve import solve
from tests.diffshard.solving.random_problems import small_problem


def _document(**changes) -> dict:
    parts = {
        "intervals": [[0, 2], [1, 3], [5, 5]],
        "costs": [[15, 55], [45, 50, 70], [7]],
        "usages": [[10, 25], [10, 15, 5], [10**6]],
        "nodes": [[0, 1]],
        "edges": [[1, 2, 3, 4, 5, 6]],
        "limit": 30,
    }
    parts |= changes
    return {
        "problem": {
            "name": "example",
            "nodes": {name: parts[name] for name in ("intervals", "costs", "usages")},
            "edges": {"nodes": parts["nodes"], "costs": parts["edges"]},
            "usage_limit": parts["limit"],
        }
    }


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_instance_is_read_and_solved(tmp_path, suffix):
    path = tmp_path / f"example{suffix}"
    text = json.dumps(_document()).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    problem = contest.read(path)
    assert [cost.tolist() for cost in problem.node_cost] == [[15, 55], [45, 50, 70], [7]]
    assert problem.edge_cost[0].tolist() == [[1, 2, 3], [4, 5, 6]]  # rows are the first node's
    assert problem.usage_node.tolist() == [0, 1]  # an empty interval uses no memory, whatever it says
    assert evaluate(problem, [0, 1, 0]).cost == 15 + 50 + 7 + 2
    assert evaluate(problem, [1, 1, 0]).excess == 10
    assert solve(problem).cost == 15 + 45 + 7 + 1


def test_parallel_edges_and_loops_are_merged():
    problem = contest.parse(
        _document(
            nodes=[[0, 1], [1, 0], [0, 0]],
            edges=[[1, 2, 3, 4, 5, FORBIDDEN], [10, 20, 30, 40, 50, FORBIDDEN], [5, 99, 99, 6]],
        )
    )
    assert problem.edge_nodes.tolist() == [[0, 1]]
    assert problem.edge_cost[0].tolist() == [[11, 32, 53], [24, 45, FORBIDDEN]]
    assert problem.node_cost[0].tolist() == [20, 61]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": [[15, 55], [], [7]]}, r"`problem.nodes.costs\[1\]` is empty"),
        ({"costs": [[15, -1], [45, 50, 70], [7]]}, r"`problem.nodes.costs\[0\]`.*not negative, got -1"),
        ({"costs": [[15, 1.5], [45, 50, 70], [7]]}, r"costs\[0\]`.*64-bit integers.*got 1.5"),
        ({"costs": [[15, 2**63], [45, 50, 70], [7]]}, r"costs\[0\]`.*64-bit integers.*got 9223372036854775808"),
        ({"costs": [[15, [1]], [45, 50, 70], [7]]}, r"costs\[0\]`.*got \[1\] at 1; scale and round"),
        ({"costs": [[15, float("nan")], [45, 50, 70], [7]]}, r"costs\[0\]`.*64-bit integers.*got nan"),
        ({"edges": [[1, 2, 3, 4, 5, float("inf")]]}, r"problem.edges.costs\[0\]`.*64-bit integers.*got inf"),
        ({"edges": []}, "`problem.edges.costs` must have 1 lists, got 0"),
        ({"usages": [[10, 25], [10, 15], [0]]}, r"`problem.nodes.usages\[1\]` has 2 entries for 3 strategies"),
        ({"usages": [[10, 25], [10, 15, 5]]}, "must have 3 lists, got 2"),
        ({"intervals": [[0, 2], [1], [5, 5]]}, r"`problem.nodes.intervals\[1\]` must have two numbers, got \[1\]"),
        ({"nodes": [[0, 3]]}, r"`problem.edges.nodes\[0\]` is \[0, 3\], but the nodes are 0 to 2"),
        ({"nodes": [[0, 1, 2]]}, r"`problem.edges.nodes\[0\]` must have two numbers, got \[0, 1, 2\]"),
        ({"edges": [[1, 2, 3]]}, r"`problem.edges.costs\[0\]` has 3 entries, but nodes 0 and 1 have 2 x 3"),
        ({"limit": -4}, "`problem.usage_limit` must be a 64-bit integer that is not negative, got -4"),
        (
            {"limit": 2**63},
            "`problem.usage_limit` must be a 64-bit integer that is not negative, got 9223372036854775808",
        ),
        ({"limit": None}, "`problem.usage_limit` must be a 64-bit integer"),
        ({"nodes": [[0, 1, 2]]}, "an edge joins two nodes; split those of more"),
        ({"costs": {"0": [1]}}, "`costs` of problem.nodes must be a JSON list, got dict"),
    ],
)
def test_broken_instances_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        contest.parse(_document(**changes))


def test_missing_parts_are_named():
    document = _document()
    del document["problem"]["nodes"]["usages"]
    with pytest.raises(ValueError, match=r"problem.nodes lacks `usages`; it has \['costs', 'intervals'\]"):
        contest.parse(document)
    document = _document()
    del document["problem"]["usage_limit"]
    with pytest.raises(ValueError, match=r"problem lacks `usage_limit`; it has \['edges', 'name', 'nodes'\]"):
        contest.parse(document)
    with pytest.raises(ValueError, match="the document lacks `problem`"):
        contest.parse({})
    with pytest.raises(ValueError, match="the document must be a JSON object, got list"):
        contest.parse([])


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"problem": ', "JSON"),
        (b"\xff\xfe\x00", "JSON"),
        (gzip.compress(b"{}", mtime=0)[:12], "gzipped JSON"),
        (b"", "JSON"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff", "gzipped JSON"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, raw, kind):
    path = tmp_path / "broken.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"broken.json` is not {kind}, or damaged"):
        contest.read(path)


def test_an_instance_without_nodes_or_room_is_answered():
    empty = contest.parse(_document(intervals=[], costs=[], usages=[], nodes=[], edges=[]))
    assert solve(empty).status == "optimal"
    none_fits = solve(contest.parse(_document(limit=0)))
    assert (none_fits.status, none_fits.feasible, none_fits.excess) == ("infeasible", False, 15.0)


def test_costs_near_the_largest_sum_exactly():
    large = FORBIDDEN - 1
    solution = solve(contest.parse(_document(costs=[[large, FORBIDDEN], [large, FORBIDDEN, FORBIDDEN], [large]])))
    assert (solution.choice, solution.cost, solution.feasible) == ((0, 0, 0), 3 * large + 1, True)


def test_costs_whose_sum_would_mean_forbidden_are_refused():
    half = FORBIDDEN // 2
    parallel = {"nodes": [[0, 1], [1, 0]], "edges": [[half, 2, 3, 4, 5, FORBIDDEN], [half, 20, 30, 40, 50, FORBIDDEN]]}
    with pytest.raises(ValueError, match=r"edges that join the same two nodes sum to 1e\+18 or more"):
        contest.parse(_document(**parallel))
    with pytest.raises(ValueError, match=r"node 0 and of its edges to itself sum to 1e\+18 or more"):
        contest.parse(_document(costs=[[half, 1], [1, 2, 3], [7]], nodes=[[0, 0]], edges=[[half, 99, 99, 6]]))


def test_usages_near_the_largest_integer_are_compared_exactly():
    large = 2**62
    intervals = [[0, 2], [1, 3], [5, 5]]
    usages = [[large, large], [large - 1, large + 1, large], [0]]
    solution = solve(contest.parse(_document(intervals=intervals, usages=usages, limit=2**63 - 1)))
    assert (solution.choice, solution.feasible) == ((0, 0, 0), True)
    solution = solve(contest.parse(_document(intervals=intervals, usages=usages, limit=2**63 - 2)))
    assert (solution.feasible, solution.excess, solution.status) == (False, 1.0, "infeasible")


def test_writing_and_reading_are_inverse(tmp_path):
    kept = 0
    for seed in range(12):
        problem = small_problem(seed, memory=True)
        if len(set(problem.usage_node.tolist())) < len(problem.usage_node):
            continue
        whole = problem._replace(
            node_cost=[cost.astype(int) for cost in problem.node_cost],
            edge_cost=[cost.astype(int) for cost in problem.edge_cost],
            memory_limit=int(problem.memory_limit),
        )
        path = tmp_path / f"{seed}.json.gz"
        contest.write(whole, path)
        again = contest.read(path)
        rng = np.random.default_rng(seed)
        choice = [int(rng.integers(len(cost))) for cost in whole.node_cost]
        assert evaluate(again, choice) == evaluate(whole, choice)
        kept += 1
    assert kept > 2


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must have integer costs"):
        contest.write(small_problem(0), tmp_path / "x.json")
    with pytest.raises(ValueError, match="which the format cannot hold"):
        contest.write(small_problem(0, devices=2), tmp_path / "x.json")


def test_intervals_that_end_before_they_start_are_refused():
    with pytest.raises(ValueError, match=r"`problem.nodes.intervals\[1\]` is \[9, 5\], which ends before it starts"):
        contest.parse(_document(intervals=[[0, 2], [9, 5], [5, 5]]))
