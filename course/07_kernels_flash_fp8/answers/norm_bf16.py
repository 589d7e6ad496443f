from labkit.answers import Edit, Same

WRONG = [
    # a sum in bf16
    Edit("  float sum = 0;", "  __nv_bfloat16 sum = 0.0f;", ("sum += v * v;", "sum = __float2bfloat16(__bfloat162float(sum) + v * v);"), told="its sum of squares"),
    # squares in bf16
    Edit("sum += v * v;", "sum += __bfloat162float(__hmul(p.v[j], p.v[j]));", told="expected | off by a factor of its own"),
    Edit(
        "__float2bfloat16(__bfloat162float(p.v[j]) * rstd * __bfloat162float(g.v[j]))",
        "__hmul(__float2bfloat16(__bfloat162float(p.v[j]) * rstd), g.v[j])",
        told="x times 1/root is rounded to bf16 on the way",
    ),
    Edit(
        "__float2bfloat16(__bfloat162float(p.v[j]) * rstd * __bfloat162float(g.v[j]))",
        "__hmul(p.v[j], __hmul(__float2bfloat16(rstd), g.v[j]))",
        told="is rounded to bf16 | or 1/root",
    ),
    Edit("rsqrtf(block_sum(sum) / cols + eps);", "__bfloat162float(__float2bfloat16(rsqrtf(block_sum(sum) / cols + eps)));", told="1/root is rounded to bf16 on the way"),
    # a number at a time
    Edit("float v = __bfloat162float(p.v[j]);", "float v = __bfloat162float(x[(long long)blockIdx.x * cols + 8 * i + j]);", told="a load of x brings"),
    Edit("    out[i] = p;", "    for (int j = 0; j < 8; ++j) out[i].v[j] = p.v[j];", told="a store to y takes"),
    Edit("Pack p = row[i], g = weight[i];", "Pack p = row[i];", ("__bfloat162float(g.v[j])", "__bfloat162float(gamma[8 * i + j])"), told="a load of gamma brings 2 bytes"),
    Edit("i < cols / 8; i += blockDim.x) {\n    Pack p = row[i];", "i < cols; i += blockDim.x) {\n    Pack p = row[i];", told="it has | expected"),
    Edit("p.v[j] = __float2bfloat16(__bfloat162float(p.v[j]) * rstd", "p.v[j] = __float2bfloat16(__bfloat162float(p.v[0]) * rstd", told="expected"),
    Edit("block_sum(sum) / cols", "block_sum(sum) / (cols / 8)", told="8 times too large"),
    Edit("block_sum(sum) / cols", "block_sum(sum)", told="divide the sum by cols"),
    Edit("j < 8; ++j) {", "j < 4; ++j) {", told="expected | its sum of squares"),
    Edit("  float sum = 0;", "  float sum;", told="a variable that was given no value"),
    # a pack and a half
    Edit("  const Pack* row = reinterpret_cast<const Pack*>(x + (long long)blockIdx.x * cols);", "  const Pack* row = reinterpret_cast<const Pack*>(x + (long long)blockIdx.x * cols + 4);", told="no multiple of 16 bytes | it has"),
]

RIGHT = [
    # the row stays in registers
    Edit(
        "  float sum = 0;\n  for (int i = threadIdx.x; i < cols / 8; i += blockDim.x) {\n    Pack p = row[i];",
        "  float sum = 0;\n  Pack kept[3];\n  for (int k = 0; k < 3; ++k) {\n    int i = threadIdx.x + 256 * k;\n    if (i >= cols / 8) break;\n    Pack p = kept[k] = row[i];",
        ("    Pack p = row[i], g = weight[i];", "    Pack p = kept[i / 256], g = weight[i];"),
    ),
    Edit("__bfloat162float(p.v[j]) * rstd * __bfloat162float(g.v[j])", "(float)p.v[j] * ((float)g.v[j] * rstd)"),
]

_NINTH = "not right, and not seen: the ninth of eight bf16 of a thread's own, whose address alone is taken"
EQUIVALENT = [Same("line 25: `<=` for `<`: `<`", _NINTH), Same("line 33: `<=` for `<`: `<`", _NINTH)]


# %% right: float4 as eight bf16, in pairs
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

__global__ void rms_norm(const __nv_bfloat16* x, const __nv_bfloat16* gamma, __nv_bfloat16* y, int cols, float eps) {
  const float4* row = (const float4*)(x + (size_t)blockIdx.x * cols);
  float sum = 0;
  for (int i = threadIdx.x; 8 * i < cols; i += blockDim.x) {
    float4 raw = row[i];
    const __nv_bfloat162* two = reinterpret_cast<const __nv_bfloat162*>(&raw);
    for (int j = 0; j < 4; ++j) {
      float2 v = __bfloat1622float2(two[j]);
      sum += v.x * v.x + v.y * v.y;
    }
  }
  const float r = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; 8 * i < cols; i += blockDim.x) {
    float4 raw = row[i], weights = ((const float4*)gamma)[i];
    __nv_bfloat162* two = reinterpret_cast<__nv_bfloat162*>(&raw);
    const __nv_bfloat162* of = reinterpret_cast<const __nv_bfloat162*>(&weights);
    for (int j = 0; j < 4; ++j) {
      float2 v = __bfloat1622float2(two[j]), g = __bfloat1622float2(of[j]);
      two[j] = __floats2bfloat162_rn(v.x * r * g.x, v.y * r * g.y);
    }
    ((float4*)(y + (size_t)blockIdx.x * cols))[i] = raw;
  }
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, x.shape[1], eps, grid=len(x), block=128)
    return y


# %% right: bits of uint4, by shifts
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

__device__ float low(unsigned u) { return __uint_as_float(u << 16); }
__device__ float high(unsigned u) { return __uint_as_float(u & 0xffff0000u); }
__device__ float squares(unsigned u) { return low(u) * low(u) + high(u) * high(u); }
__device__ unsigned scaled(unsigned u, unsigned g, float r) {
  __nv_bfloat162 p = __floats2bfloat162_rn(low(u) * r * low(g), high(u) * r * high(g));
  return *reinterpret_cast<unsigned*>(&p);
}
__global__ void rms_norm(const __nv_bfloat16* x, const __nv_bfloat16* gamma, __nv_bfloat16* y, int cols, float eps) {
  const uint4* row = reinterpret_cast<const uint4*>(x + (long long)blockIdx.x * cols);
  uint4* out = reinterpret_cast<uint4*>(y + (long long)blockIdx.x * cols);
  float sum = 0;
  for (int i = threadIdx.x; i < cols / 8; i += blockDim.x) {
    uint4 p = row[i];
    sum += squares(p.x) + squares(p.y) + squares(p.z) + squares(p.w);
  }
  float r = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; i < cols / 8; i += blockDim.x) {
    uint4 p = row[i], g = reinterpret_cast<const uint4*>(gamma)[i];
    p.x = scaled(p.x, g.x, r), p.y = scaled(p.y, g.y, r), p.z = scaled(p.z, g.z, r), p.w = scaled(p.w, g.w, r);
    out[i] = p;
  }
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, x.shape[1], eps, grid=len(x), block=256)
    return y


# %% wrong: the float32 kernel, on a copy
# told: neither x nor gamma
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

__global__ void rms_norm(const float* x, const float* gamma, float* y, int cols, float eps) {
  float sum = 0;
  x += blockIdx.x * cols, y += blockIdx.x * cols;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += x[i] * x[i];
  float r = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) y[i] = x[i] * r * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty(x.shape)
    kernel(x.float(), gamma.float(), y, x.shape[1], eps, grid=len(x), block=256)
    return y.bfloat16()
