"""XLA's text as data, with the comments by which XLA counts the parts of long tuples."""

from diffshard.checks.collectives import hlo_collectives
from diffshard.checks.hlo import parse, parts_of_tuple

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
    assert (entry["w"].called, entry["w"].body, entry["w"].trip_count) == (("condition", "body"), "body", 6)
    assert entry["w"].source == "jit(step)/while"
    assert (entry["c"].called, entry["c"].trip_count, entry["c"].source) == (("one", "other"), None, "")
