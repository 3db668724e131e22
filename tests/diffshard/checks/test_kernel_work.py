"""What kernels compute and move: slices, updates, fusions and the products of libraries."""

import pytest

from cost.base import Hardware
from diffshard.checks.kernel_work import AchievableRates
from diffshard.checks.timeline import simulate
from tests.diffshard.checks.small_schedules import MESH, RATES, played, program

FUSIONS = """\
%sliced (p: f32[1000], q: s32[]) -> f32[5] {
  %p = f32[1000]{0} parameter(0)
  %q = s32[] parameter(1)
  %double = f32[1000]{0} add(%p, %p)
  %slice = f32[5]{0} dynamic-slice(%double, %q), dynamic_slice_sizes={5}
  ROOT %result = f32[5]{0} negate(%slice)
}

%updated (p: f32[1000], u: f32[5], q: s32[]) -> f32[10,100] {
  %p = f32[1000]{0} parameter(0)
  %u = f32[5]{0} parameter(1)
  %q = s32[] parameter(2)
  %new = f32[5]{0} negate(%u)
  %update = f32[1000]{0} dynamic-update-slice(%p, %new, %q)
  ROOT %result = f32[10,100]{1,0} bitcast(%update)
}

%halves (p: f32[1000], q: s32[5,1]) -> f32[10] {
  %p = f32[1000]{0} parameter(0)
  %q = s32[5,1]{1,0} parameter(1)
  %first = f32[5]{0} slice(%p), slice={[0:5]}
  %picked = f32[5]{0} gather(%p, %q), offset_dims={}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1}
  ROOT %both = f32[10]{0} concatenate(%first, %picked), dimensions={0}
}

%scattered (p: f32[1000], q: s32[5,1], u: f32[5]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %q = s32[5,1]{1,0} parameter(1)
  %u = f32[5]{0} parameter(2)
  ROOT %rows = f32[1000]{0} scatter(%p, %q, %u), inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}

%outer (p: f32[1000], q: s32[]) -> f32[5,200] {
  %p = f32[1000]{0} parameter(0)
  %q = s32[] parameter(1)
  %inner = f32[5]{0} fusion(%p, %q), kind=kLoop, calls=%sliced
  ROOT %wide = f32[5,200]{1,0} broadcast(%inner), dimensions={0}
}

%replaced (p: f32[1000], u: f32[900], q: s32[]) -> f32[] {
  %p = f32[1000]{0} parameter(0)
  %u = f32[900]{0} parameter(1)
  %q = s32[] parameter(2)
  %zero = f32[] constant(0)
  %update = f32[1000]{0} dynamic-update-slice(%p, %u, %q)
  ROOT %total = f32[] reduce(%update, %zero), dimensions={0}, to_apply=%add
}

%product (p: bf16[10,20], q: bf16[30,20]) -> (bf16[10,30], f32[30]) {
  %p = bf16[10,20]{1,0} parameter(0)
  %q = bf16[30,20]{1,0} parameter(1)
  %dot = bf16[10,30]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %zero = f32[] constant(0)
  %sums = f32[30]{0} reduce(%dot, %zero), dimensions={0}, to_apply=%add
  ROOT %both = (bf16[10,30]{1,0}, f32[30]{0}) tuple(%dot, %sums)
}
"""  # noqa: E501 instructions are lines


@pytest.mark.parametrize(
    ("instruction", "num_bytes"),
    [
        # 5 of the 1000 entries and the index are read, 5 written.
        ("%k = f32[5]{0} fusion(%big, %i), kind=kLoop, calls=%sliced", 20 + 4 + 20),
        # The update is read and written; the rest of the buffer stays where it is.
        ("%k = f32[10,100]{1,0} fusion(%big, %b, %i), kind=kLoop, calls=%updated", 20 + 4 + 20),
        # Two slices and their indices are read, both are written.
        ("%k = f32[10]{0} fusion(%big, %places), kind=kLoop, calls=%halves", 20 + 20 + 20 + 40),
        # Five entries are added to in place: they, their places and what is added are read, they are written.
        ("%k = f32[1000]{0} fusion(%big, %places, %b), kind=kInput, calls=%scattered", 20 + 20 + 20 + 20),
        ("%k = f32[5,200]{1,0} fusion(%big, %i), kind=kLoop, calls=%outer", 20 + 4 + 4000),
        # What an update replaces is not read.
        ("%k = f32[] fusion(%big, %most, %i), kind=kInput, calls=%replaced", 400 + 3600 + 4 + 4),
        ("%k = f32[1000]{0} dynamic-update-slice(%big, %b, %i)", 20 + 4 + 20),
        ("%k = f32[5]{0} dynamic-slice(%big, %i), dynamic_slice_sizes={5}", 20 + 4 + 20),
        ("%k = f32[5]{0} bitcast(%b)", 0),
    ],
)
def test_a_kernel_moves_what_it_needs(instruction: str, num_bytes: float):
    operands = (
        "%big = f32[1000]{0} parameter(2)",
        "%i = s32[] parameter(3)",
        "%places = s32[5,1]{1,0} parameter(4)",
        "%most = f32[900]{0} parameter(5)",
    )
    assert played(*operands, instruction, computations=FUSIONS).step_s == pytest.approx(num_bytes / 10)


def test_products_inside_a_fusion_run_at_the_rate_of_their_operands():
    # 2 * 10 * 20 * 30 operations in 120 s; 400 + 1200 bytes read and 600 + 120 written would take 232.
    fusion = "%k = (bf16[10,30]{1,0}, f32[30]{0}) fusion(%p, %q), kind=kCustom, calls=%product"
    operands = ("%p = bf16[10,20]{1,0} parameter(2)", "%q = bf16[30,20]{1,0} parameter(3)")
    fast_memory = Hardware("toy", {"bfloat16": 100.0, "float32": 50.0}, 100.0, float("inf"), {}, kernel_launch_s=1.0)
    rates = AchievableRates(fast_memory, RATES.host)
    timeline = simulate(program(*operands, fusion, computations=FUSIONS), MESH, rates)
    assert timeline.step_s == 1 + 120
    assert played(*operands, fusion, computations=FUSIONS).step_s == 232


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (
            '%k = (f32[2,3]{1,0}, s8[99999]{0}) custom-call(%p, %q), custom_call_target="__cublas$lt$matmul", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1","2"],'
            '"rhs_contracting_dimensions":["1"]}}}',
            2 * 2 * 3 * 100 * 10,
        ),
        (
            '%k = (f32[2,9,9,8]{3,2,1,0}, u8[0]{0}) custom-call(%p, %kernel), window={size=3x3}, '
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"',
            2 * (2 * 9 * 9 * 8) * (3 * 3 * 4),
        ),
        (
            '%k = (f32[3,3,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%p, %gradient), window={size=3x3}, '
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"',
            2 * (2 * 9 * 9 * 8) * (3 * 3 * 4),
        ),
        (
            '%k = (bf16[1,4,6,8]{3,1,2,0}, f32[1,4,6]{2,1,0}, u8[0]{0}) custom-call(%heads, %heads, %heads), '
            'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"fmha_scale": '
            '0.125, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "4", "6", "6"], '
            '"tuple_shapes": []}, "mask_type": "NO_MASK"}}',
            2 * 2 * (4 * 6 * 6) * 8,
        ),
        (
            '%k = (bf16[1,4,6,8]{3,1,2,0}, u8[0]{0}) custom-call(%heads, %heads, %heads), '
            'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {'
            '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "4", "6", "6"]}, '
            '"mask_type": "CAUSAL"}}',
            5 * 2 * (4 * 6 * 6) * 8 / 2,
        ),
    ],
)  # fmt: skip
def test_products_of_libraries(call: str, flops: float):
    operands = (
        "%p = f32[2,100,10]{2,1,0} parameter(2)",
        "%q = f32[3,1000]{1,0} parameter(3)",
        "%kernel = f32[3,3,4,8]{3,2,1,0} parameter(4)",
        "%gradient = f32[2,9,9,8]{3,2,1,0} parameter(5)",
        "%heads = f32[1,6,4,8]{3,2,1,0} parameter(6)",
    )
    fast_memory = Hardware("toy", 50.0, float("inf"), float("inf"), {})
    timeline = simulate(program(*operands, call), MESH, AchievableRates(fast_memory, RATES.host))
    assert timeline.step_s == flops / 50
    assert timeline.notes == ()


@pytest.mark.parametrize(("target", "operands"), [("mine", 1), ("mine", 3), ("__cublas$lt$matmul", 1)])
def test_a_custom_call_whose_work_is_not_known_is_priced_by_its_bytes_and_says_so(target, operands):
    call = f'%k = f32[5]{{0}} custom-call({", ".join(["%b"] * operands)}), custom_call_target="{target}"'
    timeline = played(call)
    assert timeline.step_s == 2 + 2 * operands  # 20 bytes of each array, at 10 a second
    assert timeline.notes == (f"custom call {target!r} is priced by its bytes alone",)
