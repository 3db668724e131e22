"""XLA's text as data: comments in long tuples, what instructions call, and groups of devices in every spelling."""

import pytest

from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.hlo import parse, parts_of_tuple, replica_groups

BY_MODEL = [[0, 1, 2, 3], [4, 5, 6, 7]]
BY_DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8], f32[8], f32[8], f32[8], /*index=5*/(f32[8], bf16[4]))) -> (s32[], f32[8], f32[8], f32[8], f32[8], /*index=5*/(f32[8], bf16[4])) {
  %p = (s32[], f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/(f32[8]{0}, bf16[4]{0})) parameter(0)
  %g = ((f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/bf16[4]{0}), (f32[64]{0}, f32[64]{0}, f32[64]{0}, f32[64]{0}, f32[64]{0}, /*index=5*/bf16[32]{0})) all-gather-start(%a, %b, %c, %d, %e, /*index=5*/%f), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/(f32[8]{0}, bf16[4]{0})) tuple(%i, %a, %b, %c, %d, /*index=5*/%e)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = (s32[], f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/(f32[8]{0}, bf16[4]{0})) while(%init), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%one, %other}
}
"""  # noqa: E501 instructions are lines


def test_comments_in_tuples_hide_nothing():
    module = parse(PROGRAM)
    gather = module.computations["body"].by_name["g"]
    assert gather.operands == ("a", "b", "c", "d", "e", "f")
    assert [part.count("[") for part in parts_of_tuple(gather.type)] == [6, 6]
    loop = module.computations["main"].by_name["w"]
    assert parts_of_tuple(loop.type)[5] == "(f32[8]{0}, bf16[4]{0})"
    assert parts_of_tuple(parts_of_tuple(loop.type)[5]) == ["f32[8]{0}", "bf16[4]{0}"]
    (collective,) = hlo_collectives(PROGRAM, {"data": 8})
    assert (collective.num_tensors, collective.num_bytes, collective.count) == (6, 5 * 64 * 4 + 32 * 2, 6)


def test_what_an_instruction_calls():
    entry = parse(PROGRAM).computations["main"].by_name
    assert (entry["w"].callees, entry["w"].body, entry["w"].trip_count) == (("condition", "body"), "body", 6)
    assert entry["w"].source == "jit(step)/while"
    assert (entry["c"].callees, entry["c"].trip_count, entry["c"].source) == (("one", "other"), None, "")


def test_parameters_and_users_in_any_order():
    entry = parse(
        "ENTRY %main (a: f32[8], b: f32[2,3]) -> f32[8] {\n"
        "  %b = f32[2,3]{1,0} parameter(1)\n"
        "  %a = f32[8]{0} parameter(0)\n"
        "  ROOT %twice = f32[8]{0} add(%a, %a)\n"
        "}\n"
    ).computations["main"]
    assert entry.parameters == {0: "a", 1: "b"}
    assert [user.name for user in entry.users["a"]] == ["twice"]
    assert parts_of_tuple("(f32[2,3]{1,0}, (s32[], f32[4]{0:T(256)}))") == [
        "f32[2,3]{1,0}",
        "(s32[], f32[4]{0:T(256)})",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", BY_MODEL),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", BY_DATA),
        ("replica_groups={}, to_apply=%add", [list(range(8))]),
        ("replica_groups=[2,4]<=[8]", BY_MODEL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", BY_DATA),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", BY_MODEL),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", BY_DATA),
        ("replica_groups=mesh['a'=8] {'a'}", [list(range(8))]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", BY_MODEL),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", BY_DATA),
        ("replica_groups=mesh['x'=1,'y'=4,'z'=2], device_ids=([2,4]T(1,0)) {'z'}", BY_DATA),
        ("replica_groups=mesh['y'=2,'z'=2], device_ids=(3,1,2,0) {'z'}", [[3, 1], [2, 0]]),
    ],
)
def test_replica_groups_in_each_spelling(text, expected):
    assert replica_groups(f"channel_id=1, {text}, metadata={{}}", 8) == expected


def test_an_unknown_spelling_is_refused():
    with pytest.raises(ValueError, match="known spelling"):
        replica_groups("replica_groups=~everyone", 8)
