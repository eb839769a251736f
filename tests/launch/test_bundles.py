"""Count of a kernel's bundles: programs in the compiler's notation, with their steps counted by hand."""

import sys

import pytest

from tests.launch.test_tpu_pod import LAUNCH

sys.path.insert(0, str(LAUNCH / "tables"))
from bundles import Count, Work, count

# A grid of 3 x 2 steps in one loop. Step by step: 4 bundles; 5 more where the second index is 0 (with the 4 delay
# slots, which run in any case); the loop inside runs 6 times for 5 bundles; 4 delay slots of the outer branch.
GRID = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %1 = vsyncpa [#allocation3], 0  ;;  %s10_s4 = smov 0 } /* Start region 1 :: Start region 2 */
   0x1   :  { %s11_s5 = smov 0  ;;  %s12_s6 = smov 0 } /* End region 2 */
   0x2 LB: > { %s20_s7 = sadd.s32 1, %s21_s5  ;;  %s21_s5 = sphi %s11_s5, %s40_s5 /* a copy
for the loop */  ;;  %s22_s4 = sphi %s10_s4, %s41_s4 } /* Start region 9 */
   0x3   : > { %p30_p0 = scmp.ge.s32.totalorder %s20_s7, 2  ;;  %5 = sst [smem:[#allocation8_spill]] %s21_s5 }
   0x4   : > { %6 = dma.hbm_to_vmem [thread:$0] (%p30_p0), /*hbm=*/%s99, /*src_stride=*/%s98 /*
iteration_bounds: (3, 2)
strides: (1, 2) */ }
   0x5   : > { %s31_s8 = sld [smem:[#allocation8_spill]]  ;;  %v1_v0 = vmatmul.bf16.gmra.mxu0 %v2_v1 }
   0x6   : > { %p32_p1 = scmp.ne.s32.totalorder %s31_s8, 0 }
   0x7   : > { %33 = sbr.rel (%p32_p1) target = $region5 }
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb   :  {} /* End region 3 */
   0xc   : > { %v3_v0 = vmatmul.f32.gmra.mxu1 %v2_v1 }
   0xd   : > { %v4_v0 = vmatmul.msk.bf16.vlgmr.msra.gmra.mxu1 %v2_v1  ;;  %v5_v2 = vld [vmem:[%s1_s1]] }
   0xe PF: > { %s40_s5 = smov (%p30_p0, %s20_s7), 0  ;;  %s50_s9 = smov 0 } /* Start/End empty region 5 */
   0xf LB: >> { %s51_s9 = sphi %s50_s9, %s52_s9  ;;  %s52_s9 = sadd.s32 3, %s51_s9 } /* Start region 7 */
  0x10   : >> { %p53_p2 = scmp.ge.s32.totalorder %s52_s9, 17 /* loop exit test */ }
  0x11   : >> { %54 = sbr.rel (!%p53_p2) target = $region7 }
  0x12   : >> { %v6_v3 = vadd.f32 %v5_v3, %v5_v3 }
  0x13   :  {}
  0x14   :  {}
  0x15   :  {}
  0x16   : > { %s41_s4 = sadd.s32 (%p30_p0), 1, %s22_s4 /* predicated */ }
  0x17   : > { %p60_p3 = scmp.ge.s32.totalorder %s41_s4, 3 /* loop exit test */ }
  0x18   :  { %61 = sbr.rel (!%p60_p3) target = $region9 }
  0x19   :  {}
  0x1a   :  {}
  0x1b   :  {}
  0x1c   :  {}
  0x1d   :  { %62 = vsyncpa [#allocation3], 1 } /* exit bundle: %kernel.1 = custom-call(%x) */
"""

STEP = 4 + 2 + 4 + 1 + 6 * 7 + 2 + 1 + 4  # 0x2–0x5, 0x6–0x7, slots, 0xe, the loop inside, 0x16–0x17, 0x18, slots


def test_loops_spilled_values_and_branches_on_the_index():
    cycles = 2 + 6 * STEP + 3 * 2 + 1
    # A bfloat16 register holds 16 rows, a float32 one 8: one product in each step, two where the index is 0.
    assert count(GRID) == Count(Work(cycles, 6 * 16 + 3 * (8 + 16)), Work(0, 0))


def test_what_depends_on_data_is_counted_apart():
    """The index comes from an array: the two bundles behind the branch may run in each of the six steps."""
    unknown = GRID.replace("%s31_s8 = sld [smem:[#allocation8_spill]]", "%s31_s8 = sld [smem:[#allocation3 + %s20_s7]]")
    assert count(unknown) == Count(Work(2 + 6 * STEP + 1, 6 * 16), Work(6 * 2, 6 * 24))


def test_a_branch_with_fewer_delay_slots():
    """With one slot the inner loop leaves out 0x13 to 0x15 but in its last step; the others take the bundles behind."""
    step = 4 + 2 + 1 + 1 + 6 * 4 + 3 + 2 + 1 + 1
    cycles = 2 + 6 * step + 3 * (3 + 2) + 3 + 1
    assert count(GRID, delay_slots=1).certain.cycles == cycles


def test_a_loop_whose_end_depends_on_data_has_no_count():
    with pytest.raises(ValueError, match="trip count"):
        count(GRID.replace("scmp.ge.s32.totalorder %s52_s9, 17", "scmp.ge.s32.totalorder %s52_s9, %s99_s20"))
    with pytest.raises(ValueError, match="no bundles"):
        count("no dump")


@pytest.mark.parametrize(("instructions", "trips"), [
    ("%s2_s1 = ssub.s32 %s1_s1, 1  ;;  %p1_p1 = scmp.lt.s32.totalorder %s3_s2, 0", 12),  # from 10 to -1, a bundle late
    ("%s2_s1 = sadd.s32 4294967295, %s1_s1  ;;  %p1_p1 = scmp.lt.s32.totalorder %s3_s2, 0", 12),
    ("%s2_s1 = sshrl.u32 %s1_s1, 1  ;;  %p1_p1 = scmp.eq.s32.totalorder %s3_s2, 0", 5),  # 10, 5, 2, 1, 0
])
def test_arithmetic_of_32_bits(instructions, trips):
    """All instructions of a bundle read the registers as they were before it."""
    text = f"""\
     0   :  {{ %s0_s1 = smov 10  ;;  %s9_s2 = smov 10 }}
   0x1 LB: > {{ %s1_s1 = sphi %s0_s1, %s2_s1  ;;  {instructions}
  ;;  %s3_s2 = sphi %s9_s2, %s4_s2  ;;  %s4_s2 = smov %s1_s1 }} /* Start region 1 */
   0x2   : > {{ %5 = sbr.rel (!%p1_p1) target = $region1 }}
   0x3   :  {{}}
   0x4   :  {{}}
   0x5   :  {{}}
   0x6   :  {{}}
"""
    assert count(text).certain.cycles == 1 + 6 * (trips + 1)


def test_predicates_of_which_one_input_is_known():
    """False and anything is False: the branch is known not to be taken; not (True or anything) as well."""
    text = """\
     0   :  { %p1_p1 = scmp.eq.s32.totalorder 1, 2  ;;  %s1_s1 = sld [smem:[#allocation2]] }
   0x1   :  { %p2_p2 = scmp.eq.s32.totalorder %s1_s1, 0 }
   0x2   :  { %p3_p3 = pand %p2_p2, %p1_p1  ;;  %p4_p4 = pnand %p2_p2, %p1_p1  ;;  %p5_p5 = pneg %p1_p1 }
   0x3   :  { %p6_p6 = por %p2_p2, %p5_p5 }
   0x4   :  { %7 = sbr.rel (%p3_p3) target = $region1 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   :  { %8 = sbr.rel (!%p6_p6) target = $region1 }
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  { %9 = sbr.rel (!%p4_p4) target = $region1 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
  0x13   :  { %10 = vnop } /* Start region 1 */
"""
    assert count(text) == Count(Work(20, 0), Work(0, 0))
