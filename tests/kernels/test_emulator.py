"""The emulator: what it must catch, and that it counts and rounds as a GPU does."""

from __future__ import annotations

import re

import pytest
import torch

from minimegatron.kernels import build, operators
from tests.thorough import mostly_slow

SOURCE = """
#include "device.h"
// Reverse 64 numbers through shared memory. fault: 0 none, 1 no barrier, 2 deadlock, 3 too much stack.
__global__ void reverse(const float* in, float* out, int fault) {
  MM_SHARED(float, s, 64);
  s[threadIdx.x] = in[threadIdx.x];
  if (fault == 0) __syncthreads();
  if (fault == 2) { if (threadIdx.x < 40) __syncthreads(); else __shfl_sync(~0u, 1, 0); }
  if (fault == 3) { volatile char big[100000]; for (int i = 99999; i >= 0; --i) big[i] = 1; }
  out[threadIdx.x] = s[63 - threadIdx.x];
}
MM_EXPORT mm_reverse(const void* in, void* out, int fault, void* stream) {
  return MM_LAUNCH(reverse, 1, 64, 0, stream, (const float*)in, (float*)out, fault);
}
// Every warp primitive at once: out[lane] = {sum, max, ballot of odd lanes, value of the next lane, any, all}.
__global__ void warp(float* out) {
  int lane = threadIdx.x;
  float* mine = out + 6 * lane;
  mine[0] = warp_sum((float)lane), mine[1] = warp_max((float)(lane ^ 5));
  mine[2] = (float)__ballot_sync(~0u, lane & 1);
  mine[3] = __shfl_down_sync(~0u, (float)lane, 1);
  mine[4] = __any_sync(~0u, lane == 7), mine[5] = __all_sync(~0u, lane != 7);
}
MM_EXPORT mm_warp(void* out, void* stream) { return MM_LAUNCH(warp, 1, 32, 0, stream, (float*)out); }
__global__ void histogram(const float* in, float* out, int* top, int64_t n) {
  MM_DYNAMIC_SHARED(float, bins);
  if (threadIdx.x < 4) bins[threadIdx.x] = 0;
  __syncthreads();
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&bins[(int)in[i]], 1.0f), atomicMax(top, (int)i);
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
MM_EXPORT mm_histogram(const void* in, void* out, void* top, int64_t n, void* stream) {
  return MM_LAUNCH(histogram, (unsigned)ceil_div(n, 64), 64, 4 * sizeof(float), stream, (const float*)in, (float*)out,
                   (int*)top, n);
}
// Two block sums, one after the other.
__global__ void sums(const float* in, float* out) {
  out[threadIdx.x] = block_sum(in[threadIdx.x]);
  out[blockDim.x + threadIdx.x] = block_sum(2 * in[threadIdx.x]);
}
MM_EXPORT mm_sums(const void* in, void* out, void* stream) {
  return MM_LAUNCH(sums, 1, 128, 0, stream, (const float*)in, (float*)out);
}
__global__ void cast(const float* in, __nv_bfloat16* b, __half* h, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) b[i] = __float2bfloat16(in[i]), h[i] = __float2half(in[i]);
}
MM_EXPORT mm_cast(const void* in, void* b, void* h, int64_t n, void* stream) {
  return MM_LAUNCH(cast, 1, 32, 0, stream, (const float*)in, (__nv_bfloat16*)b, (__half*)h, n);
}
__global__ void uncast(const __half* in, float* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = __half2float(in[i]);
}
MM_EXPORT mm_uncast(const void* in, void* out, int64_t n, void* stream) {
  return MM_LAUNCH(uncast, 1, 32, 0, stream, (const __half*)in, (float*)out, n);
}
"""


@pytest.fixture(scope="module")
def emulated():
    return operators.load("selftest", "emulated", SOURCE)


@pytest.fixture(params=[0, 1, 7], ids=["forward", "backward", "shuffled"])
def library(emulated, request):
    emulated.order(request.param)
    yield emulated
    emulated.order(0)


def test_threads_meet_at_barriers(library):
    x, y = torch.arange(64.0), torch.empty(64)
    library.call("mm_reverse", x, y, 0)
    assert torch.equal(y, x.flip(0))


def test_a_missing_barrier_shows(library):
    x, y = torch.arange(64.0), torch.zeros(64)
    library.call("mm_reverse", x, y, 1)
    assert y.isnan().any(), "a thread read shared memory before it was written, and saw something else than poison"


def test_a_deadlock_is_an_error_and_the_next_launch_works(library):
    x, y = torch.arange(64.0), torch.empty(64)
    with pytest.raises(operators.KernelError, match="40 threads wait at __syncthreads, 24 for lanes"):
        library.call("mm_reverse", x, y, 2)
    library.call("mm_reverse", x, y, 0)
    assert torch.equal(y, x.flip(0))


def test_too_much_stack_is_an_error(library):
    with pytest.raises(operators.KernelError, match="65536 bytes of stack"):
        library.call("mm_reverse", torch.arange(64.0), torch.empty(64), 3)


def test_warp_primitives(library):
    out = torch.empty(32, 6)
    library.call("mm_warp", out)
    following = torch.arange(1.0, 33.0).clamp(max=31)
    fixed = [torch.full((32,), v) for v in (496.0, 31.0, float(0xAAAAAAAA))]
    assert torch.equal(out, torch.stack([*fixed, following, torch.ones(32), torch.zeros(32)], 1))


def test_atomics_dynamic_shared_memory_and_counters(library):
    x = torch.arange(150) % 4
    out, top = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    library.counters()
    library.call("mm_histogram", x.float(), out, top, 150)
    assert torch.equal(out, torch.bincount(x).float()) and top.item() == 149
    assert library.counters() == {"blocks": 3, "block_waits": 2 * 3 * 64, "warp_waits": 0, "atomics": 150 + 150 + 12}


def test_16_bit_floats_round_as_torch_does(emulated):
    x = torch.cat([
        torch.randn(4000) * torch.exp2(torch.randint(-30, 17, (4000,)).float()),
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65519.0, 65520.0, -65520.0, 6e-8, 2.98e-8, 2.99e-8]),
        torch.tensor([3.39e38, 6.1e-5, 6.097e-5, 1e-40]),
    ])  # fmt: skip
    b, h = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.float16)
    emulated.call("mm_cast", x, b, h, x.numel())
    assert torch.equal(b, x.bfloat16()) and torch.equal(h, x.half())
    nan = torch.full((1,), torch.nan)
    emulated.call("mm_cast", nan, b, h, 1)
    assert b[0].isnan() and h[0].isnan()
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    back = torch.empty(2**16)
    emulated.call("mm_uncast", every, back, 2**16)
    assert torch.equal(back.nan_to_num(7.0), every.float().nan_to_num(7.0)) and torch.equal(back.isnan(), every.isnan())


@pytest.mark.parametrize(
    "removed", mostly_slow([None, 0, 1], [0, 1]), ids=["whole", "before reading", "before writing again"]
)
def test_a_barrier_left_out_of_the_block_sum_is_caught(emulated, removed):
    """Both barriers of `block_sum` matter: each is removed in turn, and some order of warps shows it."""
    library = emulated
    if removed is not None:
        head = (build.CSRC / "device.h").read_text()
        start, barrier = head.index("void block_sum(A (&v)[N])"), "  __syncthreads();\n"
        at = start + [m.start() for m in re.finditer(re.escape(barrier), head[start:])][removed]
        broken = head[:at] + head[at + len(barrier) :]
        library = operators.load("selftest", "emulated", SOURCE.replace('#include "device.h"', broken))
    x = torch.arange(128.0)
    wrong = []
    for order in (0, 1, 2, 3):
        out = torch.empty(2, 128)
        library.order(order)
        library.call("mm_sums", x, out)
        wrong.append(not torch.equal(out, torch.tensor([[8128.0], [16256.0]]).expand(2, 128)))
    library.order(0)
    assert all(wrong) if removed is not None else not any(wrong)


def test_a_launch_no_gpu_would_take_is_refused():
    source = SOURCE.replace("MM_LAUNCH(warp, 1, 32,", "MM_LAUNCH(warp, 1, 1025,").replace("mm_warp", "mm_wide")
    with pytest.raises(operators.KernelError, match="1025 threads"):
        operators.load("selftest", "emulated", source).call("mm_wide", torch.empty(32, 6))
