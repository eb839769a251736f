"""HLO parser: modules written by hand in the compiler's notation, with their totals counted by hand."""

import pytest

from jaxlm.analysis.hlo import Traffic, asynchronous_share, parse, traffic

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
  %step = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.2, \
backend_config={"window_config":{"estimated_cycles":"40"}}
  %all-reduce.1 = (f32[8]{0:T(1024)S(1)}, /*index=1*/bf16[4,8]{1,0}) all-reduce(%g, %x), channel_id=3, \
replica_groups={{0,1,2,3}}, to_apply=%add, metadata={op_name="jit(step)/while/body/dot_general"}
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%i2, %x)
}

ENTRY %main (q: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  %loop = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond, body=%body
  %scattered = f32[2,8]{1,0} reduce-scatter(%w), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %cps = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%v), channel_id=5, source_target_pairs={{0,1}}
  %tanh = f32[6]{0} tanh(%y), backend_config={"window_config":{"estimated_cycles":"10"}}
  %cpd = f32[6]{0} collective-permute-done(%cps)
  %ars = f32[10]{0} all-reduce-start(%u), channel_id=6, replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %bitcast = f32[5]{0} bitcast(%y)
  %ard = f32[10]{0} all-reduce-done(%ars)
  %rs2 = f32[3]{0} reduce-scatter(%z), channel_id=8, replica_groups=mesh['x'=2,'y'=4] {'x'}, to_apply=%add
  ROOT %r = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def hlo_traffic(hlo: str) -> dict[str, Traffic]:
    return traffic(parse(hlo))


def test_bytes_and_counts_are_multiplied_by_the_loop_and_fusions_of_one_channel_count_once():
    # The all-reduce has nothing but a bitcast between its start and its end, so it overlaps with no compute.
    expected = {
        "all-gather": Traffic(12, 12 * 16 * 8 * 2, 12, 12 * 16 * 8 * 2),
        "all-reduce": Traffic(12 + 1, 12 * (8 * 4 + 4 * 8 * 2) + 10 * 4, 0, 0),
        "reduce-scatter": Traffic(2, 2 * 8 * 4 * 4 + 3 * 4 * 2),
        "collective-permute": Traffic(1, 24, 1, 24),
    }
    assert hlo_traffic(HLO) == expected
    overlapping = 12 * 16 * 8 * 2 + 24
    assert asynchronous_share(expected) == overlapping / sum(item.bytes for item in expected.values())
    assert asynchronous_share({}) is None


def test_a_collective_fused_with_nothing_that_takes_time_does_not_overlap():
    without = HLO.replace('"estimated_cycles":"40"', '"estimated_cycles":"0"')
    assert hlo_traffic(without)["all-gather"].asynchronous_count == 0


def test_a_collective_that_the_compiler_made_synchronous_again_does_not_overlap():
    name = 'frontend_attributes={async_collective_name="all-reduce-start"}'
    hlo = entry(f"%r = f32[8]{{0}} all-reduce(%a), channel_id=1, {name}")
    assert hlo_traffic(hlo) == {"all-reduce": Traffic(1, 32)}


def test_reduce_scatters_of_a_tpu_share_a_channel_and_are_several():
    """As libtpu 0.0.42.1 writes them: each a fusion of an all-reduce and its slices."""
    def scatter(number: int) -> str:
        return f"""%all-reduce-scatter.{number} (input_0: bf16[16,8]) -> bf16[2,8] {{
  %all-reduce.{number} = bf16[16,8]{{1,0}} all-reduce(%input_0), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %slice.{number} = bf16[2,8]{{1,0}} dynamic-slice(%all-reduce.{number}, %zero, %zero)
}}

"""

    calls = [f"%fusion.{i} = bf16[2,8]{{1,0}} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.{i}" for i in (1, 2)]
    hlo = entry(*calls).replace("ENTRY", scatter(1) + scatter(2) + "ENTRY")
    assert hlo_traffic(hlo) == {"reduce-scatter": Traffic(2, 2 * 16 * 8 * 2)}


def test_the_rare_branch_of_a_conditional_does_not_count():
    branch = "%{0} (p: f32[16,8]) -> f32[64,8] {{\n  ROOT %g.{0} = f32[64,8] all-gather(%p), dimensions={{0}}\n}}\n\n"
    hlo = entry("%c = f32[64,8] conditional(%i, %p, %p), branch_computations={%often, %seldom}")
    hlo = hlo.replace("ENTRY", branch.format("often") + branch.format("seldom") + "ENTRY")
    assert parse(hlo).executions(fused=False) == {"main": 1, "often": 1}
    assert hlo_traffic(hlo)["all-gather"].count == 1


def entry(*instructions: str) -> str:
    lines = "".join(f"  {line}\n" for line in instructions)
    return f"HloModule m\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n{lines}}}\n"


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
def test_bytes_of_an_asynchronous_start(instruction, kind, size):
    start = f"%s = {instruction}, channel_id=1"
    compute = '%t = f32[8]{0} tanh(%a), backend_config={"window_config":{"estimated_cycles":"10"}}'
    done = f"%d = f32[8]{{0}} {kind}-done(%s)"
    assert hlo_traffic(entry(start, compute, done)) == {kind: Traffic(1, size, 1, size)}
    assert hlo_traffic(entry(start, done, compute)) == {kind: Traffic(1, size, 0, 0)}


def test_trip_counts_are_the_compilers_or_the_bound_of_the_condition():
    assert hlo_traffic(HLO)["all-gather"].count == 12
    known = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert hlo_traffic(known)["all-gather"].count == 5


NESTED = """\
HloModule m

%compare (i: s32[], n: s32[]) -> pred[] {
  %i.1 = s32[] parameter(0)
  %n.1 = s32[] parameter(1)
  ROOT %lt.1 = pred[] compare(%i.1, %n.1), direction=LT
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]) parameter(0)
  %n = s32[]{:T(128)} constant(3)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] fusion(%i, %n), kind=kLoop, calls=%compare
}

%inner (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]) parameter(0)
  ROOT %exp = f32[8]{0} exponential(%b), backend_config={"window_config":{"estimated_cycles":"7"}}
}

%fused (f: f32[8]) -> f32[8] {
  %f = f32[8] parameter(0)
  ROOT %sin = f32[8] sine(%f), backend_config={"window_config":{"estimated_cycles":"1000"}}
}

%outer (d: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = (s32[], f32[8]) parameter(0)
  %again = (s32[], f32[8]) while(%d), condition=%condition, body=%inner
  ROOT %fusion = f32[8]{0} fusion(%d), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/layer_3/sin"}, \
backend_config={"window_config":{"estimated_cycles":"100"}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %copy = f32[8] copy(%p), backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  ROOT %loop = (s32[], f32[8]) while(%p), condition=%condition, body=%outer, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_executions_of_nested_loops_and_of_fused_computations():
    module = parse(NESTED)
    assert module.executions(fused=False) == {"main": 1, "outer": 5, "inner": 15, "condition": 20}
    assert module.executions(fused=True)["fused"] == 5


def test_instructions_that_span_lines_are_read_whole():
    """As the compiler writes the metadata of splash attention's kernels."""
    kernel = (
        '%k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        '"xprof_metadata":"{}"\n}}, metadata={op_name="attention"}'
    )
    instructions = parse(entry(kernel, "%r = f32[8] tanh(%k)")).computations["main"]
    assert [one.name for one in instructions] == ["k", "r"]
    assert instructions[0].is_kernel and instructions[0].op_name == "attention"


def test_a_program_without_collectives_has_no_traffic():
    assert hlo_traffic(entry("ROOT %p = f32[2]{0} parameter(0)")) == {}
