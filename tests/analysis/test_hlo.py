"""Reading of HLO: a module written by hand in the compiler's notation, with its totals counted by hand."""

import pytest

from jaxlm.analysis.hlo import Traffic, collectives, traffic

HLO = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cond (c: (s32[], bf16[4,8])) -> pred[] {
  %c = (s32[], bf16[4,8]) parameter(0)
  %bound = s32[]{:T(128)} constant(12)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%async_collective_fusion.1 (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8] parameter(0)
  ROOT %all-gather.9 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups={{0,1,2,3}}, dimensions={0}
}

%async_collective_fusion.2 (p.2: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8] parameter(0)
  ROOT %all-gather.10 = bf16[16,8]{1,0} all-gather(%p.2), channel_id=7, \
replica_groups={{0,1,2,3}}, dimensions={0}
}

%body (s: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %s = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%s), index=1
  %start = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %done = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.2
  %all-reduce.1 = (f32[8]{0:T(1024)S(1)}, /*index=1*/bf16[4,8]{1,0}) all-reduce(%g, %x), channel_id=3, \
replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="jit(step)/while/body/dot_general"}
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%i2, %x)
}

ENTRY %main (q: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  %loop = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond, body=%body
  %scattered = f32[2,8]{1,0} reduce-scatter(%w), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %cps = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%v), channel_id=5, source_target_pairs={{0,1}}
  %cpd = f32[6]{0} collective-permute-done(%cps)
  %ars = f32[10]{0} all-reduce-start(%u), channel_id=6, replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %ard = f32[10]{0} all-reduce-done(%ars)
  %rs2 = f32[3]{0} reduce-scatter(%z), channel_id=8, replica_groups=mesh['x'=2,'y'=4] {'x'}, to_apply=%add
  ROOT %r = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_bytes_and_counts_are_multiplied_by_the_loop_and_fusions_of_one_channel_count_once():
    assert traffic(HLO) == {
        "all-gather": Traffic(12, 12 * 16 * 8 * 2, 12, 12 * 16 * 8 * 2),
        "all-reduce": Traffic(12 + 1, 12 * (8 * 4 + 4 * 8 * 2) + 10 * 4, 1, 10 * 4),
        "reduce-scatter": Traffic(2, 2 * 8 * 4 * 4 + 3 * 4 * 2),
        "collective-permute": Traffic(1, 24, 1, 24),
    }


def test_origins_are_kept():
    origins = {one.origin for one in collectives(HLO)}
    assert "jit(step)/while/body/dot_general" in origins


@pytest.mark.parametrize(
    ("instruction", "kind", "size"),
    [
        ("((f32[4],f32[8]),(f32[16],f32[32])) all-gather-start(%a, %b)", "all-gather", 4 * (16 + 32)),
        ("((f32[4,2]{1,0:T(8,128)}, /*index=1*/f32[8]{0}), (f32[16,2]{1,0}, f32[32]{0})) all-gather-start(%a, %b)",
         "all-gather", 4 * (32 + 32)),
        ("(f32[4]{0}, f32[16]{0}) all-gather-start(%a)", "all-gather", 4 * 16),
        ("((bf16[6], bf16[2]), (bf16[6], bf16[2]), u32[], u32[]) collective-permute-start(%a, %b)",
         "collective-permute", 2 * 8),
        ("((f32[16], f32[8]), (f32[4], f32[2]), u32[]) reduce-scatter-start(%a, %b)", "reduce-scatter", 4 * 24),
        ("((f32[16]), f32[16], u32[]) all-to-all-start(%a)", "all-to-all", 4 * 16),
        ("(f32[10], f32[6]) all-reduce-start(%a, %b)", "all-reduce", 4 * 16),
    ],
)
def test_what_an_asynchronous_start_moves(instruction, kind, size):
    hlo = "HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n" + f"  %s = {instruction}, channel_id=1\n" + "}\n"
    assert traffic(hlo) == {kind: Traffic(1, size, 1, size)}


def test_a_trip_count_that_the_compiler_states_is_used():
    known = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert traffic(known)["all-gather"].count == 5


def test_a_program_without_collectives_has_no_traffic():
    assert traffic("HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %p = f32[2]{0} parameter(0)\n}\n") == {}
