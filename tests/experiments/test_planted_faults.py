"""Planted faults: the lists fit the code, and the command tells what a small repository's tests notice."""

import ast

import pytest

from experiments.planted_faults import __main__ as command
from experiments.planted_faults.__main__ import (
    BROKEN_TEST,
    NOT_APPLICABLE,
    NOT_NOTICED,
    NOTICED,
    TIMED_OUT,
    Outcome,
    outcome_of,
    without_broken_tests,
)
from experiments.planted_faults.faults import ROOT, Fault, faulty_text, list_names, parse, read_faults, selected
from experiments.planted_faults.random_faults import changes_by_line, draw_faults
from experiments.planted_faults.related_tests import related_tests
from tests.experiments.printed_tables import printed_rows

FAULTS = [(name, fault) for name in list_names() for fault in read_faults(name)]
CODE = """
def half(x):
    return x / 2

def unused():
    return 7
"""
TESTS = """
import time
import pytest
from cost.thing import half

@pytest.mark.parametrize("number", [4], ids=["of a number"])
def test_half(number):
    half_of_4 = half(number)
    time.sleep(max(half_of_4 - 100, 0))
    assert half_of_4 == 2
"""


def test_every_fault_applies_to_the_code_as_it_is():
    for name, fault in FAULTS:
        faulty = faulty_text(fault, ROOT)
        assert faulty is not None, f"{name}: the text does not occur once, so write the fault anew: {fault}"
        ast.parse(faulty)


def test_every_file_with_faults_has_tests():
    paths = {fault.path for _, fault in FAULTS}
    assert [path for path in sorted(paths) if not related_tests(path, ROOT)] == []


def test_there_are_enough_faults_and_none_twice():
    assert len(read_faults("faults")) >= 60
    assert len(set(FAULTS)) == len({fault for _, fault in FAULTS}) == len(FAULTS)


@pytest.fixture
def repository(tmp_path):
    for path, text in {"cost/__init__.py": "", "cost/thing.py": CODE, "tests/cost/test_thing.py": TESTS}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "replacement", "verdict"),
    [
        ("x / 2", "x / 3", NOTICED),
        ("return 7", "return 8", NOT_NOTICED),
        ("x / 2", "x * 1000", TIMED_OUT),
        ("return", "yield", NOT_APPLICABLE),  # occurs twice
    ],
)
def test_what_becomes_of_a_fault(repository, text, replacement, verdict):
    limit_s = 3.0 if verdict == TIMED_OUT else 60.0
    outcome = outcome_of(Fault("cost/thing.py", text, replacement), repository, limit_s)
    by = "tests/cost/test_thing.py::test_half[of a number]" if verdict == NOTICED else ""
    assert (outcome.verdict, outcome.by) == (verdict, by)
    assert (repository / "cost/thing.py").read_text() == CODE


def test_a_test_that_fails_without_the_fault_has_noticed_nothing(repository):
    (repository / "tests/cost/test_thing.py").write_text(f"{TESTS}\ndef test_time():\n    assert False\n")
    tests = [f"tests/cost/test_thing.py::{name}" for name in ("test_half[of a number]", "test_time")]
    outcomes = [Outcome(NOTICED, tests[0], 1.0), Outcome(NOTICED, tests[1], 2.0), Outcome(NOT_NOTICED, "", 3.0)]
    found = without_broken_tests(outcomes, repository, 60.0)
    assert found == [outcomes[0], Outcome(BROKEN_TEST, tests[1], 2.0), outcomes[2]]


def test_the_nearest_tests_come_first(repository):
    for path, text in {
        "cost/a_test_by_import": "from cost import thing",
        "cost/test_by_import": "from cost import thing",
        "cost/test_a_neighbour": "",
        "cost/test_neighbour": "import cost.other",
        "test_above": "import math",
        "search_spaces/test_elsewhere": "import cost.thing",
    }.items():
        (repository / "tests" / path).parent.mkdir(exist_ok=True)
        (repository / "tests" / f"{path}.py").write_text(text)
    (repository / "tests/conformance").mkdir()
    (repository / "tests/conformance/test_cost_models.py").write_text("")
    (repository / "cost/other.py").write_text("import cost.thing")
    nearest = ["cost/test_thing", "cost/test_by_import", "search_spaces/test_elsewhere"]
    found = [*nearest, "cost/test_neighbour", "cost/test_a_neighbour", "conformance/test_cost_models"]
    assert related_tests("cost/thing.py", repository) == [f"tests/{path}.py" for path in found]
    assert related_tests("cost/thing.py", repository, nearest_only=True) == [f"tests/{path}.py" for path in nearest]
    others = related_tests("cost/deep/unknown.py", repository, nearest_only=True)
    assert sorted(others) == sorted(f"tests/{path}.py" for path in {*found} - {nearest[2]})


def test_main_counts_and_keeps_records(monkeypatch, capsys, tmp_path):
    planted = []

    def outcome(fault, copy, limit_s, *, nearest_only):
        assert faulty_text(fault, copy) is not None
        planted.append((fault, limit_s, nearest_only))
        return Outcome(NOTICED, "tests/a.py::test_b", 1.0) if len(planted) == 1 else Outcome(NOT_NOTICED, "", 2.0)

    monkeypatch.setattr(command, "outcome_of", outcome)
    monkeypatch.setattr(command, "without_broken_tests", lambda outcomes, *_: outcomes)
    words = ["--numbers", "3", "5", "--jobs", "1", "--time-limit", "7", "--nearest", "--records", str(tmp_path)]
    for _ in range(2):  # the second time all comes from the records
        assert command.main(words) == 1
        printed = capsys.readouterr().out
        assert printed.splitlines()[-1] == "2 faults: 1 noticed (50%), 1 not noticed"
        rows = {row[0]: row[2:] for row in printed_rows(printed) if row[0]}
        assert rows == {"3": [NOTICED, "test_b"], "5": [NOT_NOTICED, ""]}
    faults = read_faults("faults")
    assert planted == [(faults[2], 7.0, True), (faults[4], 7.0, True)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--numbers", "0"], "`--numbers` must be from 1 to"),
        (["--paths", "nowhere"], "begins with 'nowhere'"),
        (["--sample", "0"], "--sample must be positive"),
        (["--sample", "1000000"], "`--sample` must be at most"),
        (["--jobs", "0"], "--jobs and --time-limit must be positive"),
        (["--time-limit", "-1"], "--jobs and --time-limit must be positive"),
    ],
)
def test_bad_options_are_refused_before_any_work(monkeypatch, capsys, words, said):
    monkeypatch.setattr(command, "outcomes_of", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises(SystemExit):
        command.main(words)
    assert said in capsys.readouterr().err


def changed_texts(code):
    """Returns all texts that one change makes of a code of one line."""
    data = code.encode()
    changes = changes_by_line(data).get(0, [])
    return {(data[:first] + replacement.encode() + data[last:]).decode() for first, last, replacement in changes}


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("x = a < (b)", {"x = a <= (b)", "x = a > (b)"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = (a) - b and c", {"x = (a) + b and c", "x = (a) - b or c"}),
        ("x = not (a)", {"x = (a)"}),
        ("x = -1", {"x = 1", "x = -0", "x = -2"}),
        ("x = f('ü', True)", {"x = f(True, 'ü')", "x = f('ü', False)"}),
        ("x = np.max(a, b)", {"x = np.min(a, b)", "x = np.max(b, a)"}),
        ("x = a if b else c", {"x = a if not (b) else c"}),
        ("x: dict[1 | 2] = isinstance(a, b)", set()),
        ("raise ValueError(1)", set()),
    ],
)
def test_the_changes_of_a_line(code, changed):
    assert changed_texts(code) == changed


def test_random_faults_apply_can_be_read_and_follow_from_the_seed():
    faults = draw_faults(60, 7, ROOT)
    assert faults == draw_faults(60, 7, ROOT)
    assert len(set(faults)) == 60
    assert len({fault.path for fault in faults}) > 30
    assert faults != draw_faults(60, 8, ROOT)
    for fault in faults:
        faulty = faulty_text(fault, ROOT)
        assert faulty is not None
        ast.parse(faulty)


def test_a_sample_of_random_faults_is_planted_in_place_of_a_list(monkeypatch, capsys):
    monkeypatch.setattr(command, "outcomes_of", lambda faults, **_: [Outcome(NOTICED, "a", 1.0)] * len(faults))
    assert command.main(["--sample", "3", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "Random faults of seed 5" in printed
    assert printed.splitlines()[-1] == "3 faults: 3 noticed (100%)"
    assert draw_faults(3, 5, ROOT)[0].path in printed


def test_faults_are_selected_by_number_or_path():
    faults = [Fault(path, "a", "b") for path in ("cost/x.py", "diffshard/y.py", "cost/z.py")]
    assert [number for number, _ in selected(faults, [], [])] == [1, 2, 3]
    assert [number for number, _ in selected(faults, [2], [])] == [2]
    assert [number for number, _ in selected(faults, [2], ["cost/z"])] == [2, 3]


@pytest.mark.parametrize("line", ["cost/x.py a ==> b", "cost/x.py: a => b", "cost/x.py: a ==> a", "cost/x.py:  ==> b"])
def test_a_line_that_is_no_fault_is_refused_with_its_place(line):
    with pytest.raises(ValueError, match=r"list\.txt:3 must be FILE: TEXT ==> REPLACEMENT"):
        parse(line, "list.txt:3")
    assert parse("cost/x.py: a: b ==> ", "list.txt:4") == Fault("cost/x.py", "a: b", "")
