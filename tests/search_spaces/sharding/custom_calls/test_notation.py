"""Rules as text: what they say of shapes, and which texts and shapes are refused."""

import pytest

from search_spaces.sharding.custom_calls.notation import parse_rule


def test_a_product_of_matrices():
    rule = parse_rule("m k, k n -> m n", reduction={"k": "sum"}).rule([(8, 4), (4, 6)], [(8, 6)])
    assert rule.operands == (((0,), (1,)), ((1,), (2,)))
    assert rule.results == (((0,), (2,)),)
    assert (rule.sizes, rule.reduction, rule.need_replication) == ((8, 4, 6), {1}, frozenset())
    assert rule.reduction_is_sum


def test_what_only_operands_or_only_results_have_stays_whole():
    rule = parse_rule("b s, t s -> b n").rule([(8, 4), (5, 4)], [(8, 3)])
    assert {rule.sizes[f] for f in rule.need_replication} == {4, 5, 3}


def test_factors_of_maxima_are_no_sums():
    assert not parse_rule("b s -> b", reduction={"s": "max"}).rule([(8, 4)], [(8,)]).reduction_is_sum


def test_a_brackets_factors_follow_from_other_arrays():
    rule = parse_rule("b (h g) d, b h d -> b (h g) d")
    assert rule.sizes([(2, 12, 8), (2, 3, 8)]) == {"b": 2, "d": 8, "h": 3, "g": 4}
    assert rule.result_shapes([(2, 8, 8), (2, 2, 8)], {}) == [(2, 8, 8)]


def test_brackets_may_have_factors_of_size_zero():
    assert parse_rule("(a b), a -> b").sizes([(0,), (3,)]) == {"a": 3, "b": 0}
    assert parse_rule("(a b), a, b -> b").sizes([(0,), (0,), (5,)]) == {"a": 0, "b": 5}
    assert parse_rule("(a b), (b c), a, c -> b").sizes([(0,), (10,), (0,), (2,)]) == {"a": 0, "b": 5, "c": 2}


def test_dots_stand_for_any_number_of_dimensions():
    rule = parse_rule("... d, d -> ... d", whole="d")
    whole = rule.rule([(2, 3, 4), (4,)], [(2, 3, 4)])
    assert [whole.sizes[f] for f in sorted(whole.need_replication)] == [4]
    assert rule.rule([(4,), (4,)], [(4,)]).sizes == (4,)


def test_a_batch_comes_first():
    rule = parse_rule("... d, d -> ... d").with_batch((True, False))
    assert str(rule) == "vmap_0 ... d, d -> vmap_0 ... d"
    assert str(rule.with_batch((False, True))) == "vmap_0 ... d, vmap_1 d -> vmap_1 vmap_0 ... d"
    assert rule.sizes([(7, 2, 4), (4,)]) == {"vmap_0": 7, "...0": 2, "d": 4}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("m k, k n", {}, "one '->'"),
        ("m k -> m -> k", {}, "one '->'"),
        ("m:k -> m", {}, "has ':' in 'm:k'"),
        ("(a (b c)) -> a", {}, "dimensions are names, brackets with names"),
        ("m m -> m", {}, "names a factor twice in 'm m'"),
        ("m k -> m", {"reduction": {"q": "sum"}}, r"`reduction` names \['q'\]"),
        ("m k -> m", {"reduction": {"k": "mean"}}, r"must be made of \('sum', 'max', 'min'\), not \['mean'\]"),
        ("m k l -> m", {"reduction": {"k": "sum", "l": "max"}}, "combine all factors of a kernel alike"),
        ("m k -> m", {"reduction": {"m": "sum"}}, "every result of `rule` 'm k -> m' still has that dimension"),
        ("m k -> m", {"whole": ["x"]}, r"`need_replication` names \['x'\]"),
        ("m k -> m", {"whole": ["k"], "reduction": {"k": "sum"}}, "both name"),
    ],
)
def test_texts_that_are_no_rules(text, options, message):
    with pytest.raises(ValueError, match=message):
        parse_rule(text, **options)


def test_a_rule_is_a_string():
    with pytest.raises(TypeError, match="`rule` must be a string"):
        parse_rule(("m", "k"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("m k, k n -> m n", [(8, 4)], [], r"is for 2 operands, but the function has 1, of shapes \[\(8, 4\)\]"),
        ("m -> m", [(8,)], [(8,), (8,)], "is for 1 results, but the function has 2"),
        ("m k -> m", [(8,)], [], r"gives operand 0 2 dimensions \('m k'\), but its shape is \(8,\)"),
        ("... m k -> m", [(8,)], [], "gives operand 0 at least 2 dimensions"),
        (
            "m k -> m",
            [(8, 4)],
            [(4,)],
            r"'m' has one size everywhere, but it is 8 elsewhere and 4 in dimension 0 of res",
        ),
        ("(a b) -> a", [(8,)], [], r"does not say the sizes of \['a', 'b'\] in dimension 0 of operand 0"),
        ("(a b), a -> b", [(0,), (0,)], [], r"does not say the sizes of \['b'\] .*, of another size than 0"),
        ("(a b), a -> b", [(8,), (0,)], [], r"into \{'a': 0\}, which does not give 8"),
        ("(a b), a -> b", [(8,), (3,)], [], "divides dimension 0 of operand 0, of shape"),
        ("... m, ... m -> m", [(8, 2), (8, 8, 2)], [], r"\{'operand 0': 1, 'operand 1': 2\}"),
    ],
)
def test_shapes_that_a_rule_does_not_fit(text, operands, results, message):
    with pytest.raises(ValueError, match=message):
        parse_rule(text).sizes(operands, results)
