"""Bytes that a program moves, counted in its text."""

from treeflash_jax.bench.program_text import count_bytes

PROGRAM = """
%sliced (p0: f32[64,256], p1: s32[]) -> f32[1,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %part = f32[1,256]{1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,256}
  ROOT %negated = f32[1,256]{1,0} negate(%part)
}

%body (state: (f32[64,256], s32[])) -> (f32[64,256], s32[]) {
  %state = (f32[64,256]{1,0}, s32[]) parameter(0)
  %table = f32[64,256]{1,0} get-tuple-element(%state), index=0
  %at = s32[]{:T(128)S(6)} get-tuple-element(%state), index=1
  %row = f32[1,256]{1,0:T(8,128)S(1)} fusion(%table, %at), kind=kLoop, calls=%sliced
  %new = f32[64,256]{1,0} dynamic-update-slice(%table, %row, %at)
  ROOT %next = (f32[64,256]{1,0}, s32[]) tuple(%new, %at)
}

ENTRY %main (x: f32[64,256]) -> bf16[64,256] {
  %x = f32[64,256]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (f32[64,256]{1,0}, s32[]) tuple(%x, %zero)
  %loop = (f32[64,256]{1,0}, s32[]) while(%start), body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %last = f32[64,256]{1,0} get-tuple-element(%loop), index=0
  ROOT %kernel = bf16[64,256]{1,0} custom-call(%last, %x), custom_call_target="tpu_custom_call"
}
"""


def test_loops_slices_updates_and_kernels():
    """Ten times a row of 1 KiB is read, and a row is updated: read and written. The kernel reads 128 KiB and writes 32."""
    assert count_bytes(PROGRAM) == 10 * (1024 + 2 * 1024) + 2 * 65536 + 32768
