"""Names told once must stand for exactly the names that they replace."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffshard.plans.printing import format_bytes, format_s, group_names, readable_path


def patterns(names, keys=None):
    return [(g.pattern, g.members) for g in group_names(names, keys or [0] * len(names))]


def test_numbers_become_a_star_when_all_that_occur_are_there():
    assert patterns(["layer_0/w", "layer_1/w", "head/w"], "aab") == [("layer_*/w", (0, 1)), ("head/w", (2,))]


def test_some_numbers_become_ranges():
    names = [f"layer_{i}/w" for i in range(12)]
    keys = ["x" if i in (0, 1, 2, 5, 11) else "y" for i in range(12)]
    assert [p for p, _ in patterns(names, keys)] == ["layer_{0-2,5,11}/w", "layer_{3-4,6-10}/w"]


def test_words_are_listed_and_a_number_that_never_varies_stays():
    names = [f"opt[0].{m}/layer_{i}/{k}" for m in ("mu", "nu") for i in range(3) for k in ("bias", "scale")]
    assert patterns(names) == [("opt[0].{mu,nu}/layer_*/{bias,scale}", tuple(range(12)))]


def test_names_with_other_keys_or_other_structure_stay_apart():
    assert patterns(["a/w", "b/w"], "xy") == [("a/w", (0,)), ("b/w", (1,))]
    assert patterns(["a/w", "a/w/v"]) == [("a/w", (0,)), ("a/w/v", (1,))]


def test_too_many_words_stay_rows():
    assert len(patterns(["one/w", "two/w", "three/w", "four/w", "five/w"])) == 5


def test_no_names():
    assert patterns([]) == []


def expanded(pattern, numbers):
    """All names that a pattern stands for; `*` is any of these numbers."""
    parts = []
    for piece in re.findall(r"\{[^}]*\}|\*|[^{*]+", pattern):
        if piece == "*":
            parts.append(sorted(numbers))
        elif piece.startswith("{"):
            alternatives = []
            for word in piece[1:-1].split(","):
                ends = re.fullmatch(r"(\d+)-(\d+)", word)
                alternatives += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [word]
            parts.append(alternatives)
        else:
            parts.append([piece])
    return {"".join(p) for p in itertools.product(*parts)}


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from("01234"), st.sampled_from(["w", "v"])),
        st.sampled_from("xy"),
        min_size=1,
    )
)
def test_patterns_stand_for_their_members_and_nothing_else(entries):
    names = [f"{a}_{i}/{k}" for a, i, k in entries]
    keys = list(entries.values())
    seen = []
    for group in group_names(names, keys):
        seen += group.members
        assert len({keys[m] for m in group.members}) == 1
        members = {names[m] for m in group.members}
        universe = {i for a, i, _ in entries if group.pattern.startswith((a, "{"))}
        assert members <= expanded(group.pattern, universe)
        if "*" not in group.pattern:
            assert members == expanded(group.pattern, universe)
    assert sorted(seen) == list(range(len(names)))


def test_paths_are_read_with_slashes():
    assert readable_path("state.params['layer_0']['w'][1]") == "state.params/layer_0/w[1]"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.234, "1.23 s"), (0.0126, "12.6 ms"), (0.9999, "1.00 s"), (2.5e-5, "25.0 µs"), (3e-10, "0.30 ns")],
)
def test_seconds(seconds, text):
    assert format_s(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (1536, "1.50 KiB"), (80 * 2**30, "80.0 GiB"), (float("inf"), "unlimited")]
)
def test_bytes(size, text):
    assert format_bytes(size) == text
