"""Collectives and memory traffic, read from the text of compiled programs."""

import jax
import jax.numpy as jnp
from conftest import needs_8_devices
from jax.sharding import PartitionSpec

import treeflash_jax as tf
from treeflash_jax.bench.program_text import count_bytes, count_moved, find_collectives, sum_collectives


@needs_8_devices
def test_collectives_know_their_loops_and_branches_and_trips_of_nested_loops_multiply():
    mesh = tf.make_mesh(1, 8)

    def body(x, rounds):
        def step(carry):
            index, x = carry
            inner = lambda _, x: jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(jax.lax.psum(x, "model")), x)  # noqa: E731
            x = jax.lax.fori_loop(0, 3, inner, x)
            return index + 1, jax.lax.cond(index > 2, lambda: jax.lax.all_gather(x, "model")[0], lambda: x)

        def goes_on(carry):
            return jax.lax.ppermute(carry[1], "model", [(i, 7 - i) for i in range(8)]).sum() < rounds

        return jax.lax.while_loop(goes_on, step, (jnp.zeros_like(rounds), x))[1]

    spec = PartitionSpec("model")
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False))
    text = program.lower(jnp.ones((8, 16)), jnp.int32(5)).compile().as_text()
    found = {one.kind: one for one in find_collectives(text)}
    assert found["all-reduce"].trips == 3 * 7 and found["all-reduce"].in_loop and not found["all-reduce"].in_branch
    assert found["all-gather"].trips == 1 and found["all-gather"].in_loop and found["all-gather"].in_branch
    assert found["collective-permute"].in_loop, "what a loop's condition needs belongs to its trips"
    assert sum_collectives(find_collectives(text)) == {
        "all-gather": {"count": 1, "bytes": 8 * 64},
        "all-reduce": {"count": 3 * 7, "bytes": 3 * 7 * 64},
        "collective-permute": {"count": 1, "bytes": 64},
    }


GATHER = "%gather = bf16[8,16]{1,0} all-gather(%p), channel_id=1, dimensions={0}"
TPU_PROGRAM = f"""
%start_body (p: bf16[4,16]) -> bf16[8,16] {{
  {GATHER}
}}

%done_body (p: bf16[4,16]) -> bf16[8,16] {{
  {GATHER}
}}

%async_collective_fusion.7 (p: bf16[4,16]) -> bf16[8,16] {{
  {GATHER}
}}

%body.1 (p: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %fusion.1 = (f32[16], bf16[8,16]) fusion(%x), kind=kOutput, calls=%async_collective_fusion.7
  %all-reduce.3 = f32[1,16]{{1,0:T(1,128)S(1)}} all-reduce(%x), channel_id=2, to_apply=%sum
}}

%condition.1 (p: (s32[], f32[16])) -> pred[] {{
  %constant.4 = s32[]{{:T(128)}} constant(32)
  %counter = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt.6 = pred[]{{:T(512)}} compare(%counter, %constant.4), direction=LT, metadata={{}}
}}

ENTRY %main (x: f32[16]) -> f32[16] {{
  %async-collective-start.3 = (bf16[4,16], bf16[8,16]) fusion(%x), kind=kLoop, calls=%start_body
  %while.9 = (s32[]{{:T(128)}}, f32[16]{{0:T(128)}}) while(%tuple), condition=%condition.1, body=%body.1, metadata={{}}
  ROOT %async-collective-done.3 = bf16[8,16] fusion(%x), kind=kLoop, calls=%done_body
}}
"""


def test_a_tpu_program_counts_loops_by_their_bound_and_a_collective_beside_other_work_where_it_starts():
    gather = {"count": 1, "bytes": 8 * 16 * 2}
    counted = sum_collectives(find_collectives(TPU_PROGRAM))
    assert counted == {"all-gather": gather, "all-reduce": {"count": 32, "bytes": 32 * 64}}
    unbounded = TPU_PROGRAM.replace("%constant.4), direction", "%limit), direction")
    counted = sum_collectives(find_collectives(unbounded))
    assert counted == {"all-gather": gather, "all-reduce": {"count": 1, "bytes": 64}}


@needs_8_devices
def test_a_gathered_cache_is_seen():
    mesh = tf.make_mesh(4, 2)
    place, whole = (jax.sharding.NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data", "model"), ("data",)))
    copy = jax.jit(lambda x: x * 2, out_shardings=whole)
    text = copy.lower(jax.ShapeDtypeStruct((4, 2, 256, 8), jnp.float32, sharding=place)).compile().as_text()
    found = find_collectives(text)
    assert count_moved(found, 1 * 2, 256 * 8) == 1 and not any(one.in_loop for one in found)
    assert count_moved(found, 1 * 2, 512 * 8) == 0 and count_moved(found, 1 * 2, 250 * 8) == 0


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
