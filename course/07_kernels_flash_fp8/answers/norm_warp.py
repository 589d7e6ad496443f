from labkit.answers import Edit, Same

WRONG = [
    Edit("float sum = 0;", "float sum;", told="a variable that was given no value"),
    Edit("  __syncthreads();\n", "", told="a race"),
    Edit("lane < warps ? parts[lane] : 0.0f", "parts[lane]", told="never written"),
    # each of the 8 warps is counted 4 times
    Edit("lane < warps ? parts[lane] : 0.0f", "parts[lane % warps]", told="4 times too large"),
    Edit("int o = 16", "int o = 8", told="expected"),
    # lane 0 alone has the sum
    Edit("__shfl_xor_sync(0xffffffff, v, o)", "__shfl_down_sync(0xffffffff, v, o)", told="expected"),
    # the other half of the warp never comes
    Edit("v += __shfl_xor", "if (threadIdx.x % 32 < o) v += __shfl_xor", told="names lane 16, too; thread 16 waits"),
    Edit("0xffffffff", "0x1", told="with the mask 0x1, which does not name its own lane 1"),
    Edit("  __syncthreads();\n", "  __syncthreads();\n  __syncthreads();\n  __syncthreads();\n", told="2 are enough"),
    # each warp has its own part of the sum
    Edit("  sum = warp_sum(lane < warps ? parts[lane] : 0.0f);\n", "", told="expected"),
    Edit("if (lane == 0) parts[warp] = sum;", "if (lane == warp) parts[warp] = sum; else parts[lane] = 0;", told="a race"),
]

RIGHT = [
    Edit("lane < warps ? parts[lane] : 0.0f", "lane < warps ? parts[lane] : 0", ("block=256", "block=96")),
    # one warp a row: no barrier at all
    Edit(
        """  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < warps ? parts[lane] : 0.0f);
""",
        "",
        ("block=256", "block=32"),
    ),
]

EQUIVALENT = [
    Same("if (lane == 1) parts[warp] = sum;", "after the butterfly all lanes hold the sum: any of them may write it"),
    Same("parts[warp] = sum;", "all lanes write the same number to the same word"),
]


# %% right: the row stays in registers: x is read once
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {

  __shared__ float parts[8];
  const bool wide = cols % 4 == 0 && cols <= 4 * 4 * 256;
  const long long at = (long long)blockIdx.x * cols;
  float4 kept[4];
  float sum = 0;
  if (wide) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int i = threadIdx.x + k * 256;
      if (i < cols / 4) {
        kept[k] = reinterpret_cast<const float4*>(x + at)[i];
        sum += kept[k].x * kept[k].x + kept[k].y * kept[k].y + kept[k].z * kept[k].z + kept[k].w * kept[k].w;
      }
    }
  }
  if (!wide) { sum = 0; for (int i = threadIdx.x; i < cols; i += 256) { float v = x[at + i]; sum += v * v; } }
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < 8; ++w) sum += parts[w];
  const float r = rsqrtf(sum / cols + eps);
  if (wide) {
    for (int k = 0; k < 4; ++k) {
      int i = threadIdx.x + k * 256;
      if (i < cols / 4) {
        float4 g = ((const float4*)gamma)[i];
        float4* out = (float4*)(y + at);
        out[i] = make_float4(kept[k].x * r * g.x, kept[k].y * r * g.y, kept[k].z * r * g.z, kept[k].w * r * g.w);
      }
    }
  } else for (int i = threadIdx.x; i < cols; i += 256) y[at + i] = x[at + i] * r * gamma[i];
}
""")

def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% right: float4 through a cast of an address; the reduction ends with a shuffle down in the first warp
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ void add(float& to, const float4& v) { to += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[8], total[1];
  const float *row = &x[(long long)blockIdx.x * cols];
  float *out = &y[(long long)blockIdx.x * cols], sum = 0;
  const bool wide = cols % 4 == 0;
  if (wide)
    for (int i = threadIdx.x; i < cols / 4; i += 256) { float4 v = *(const float4*)&row[4 * i]; add(sum, v); }
  else
    for (int i = threadIdx.x; i < cols; i += 256) sum += row[i] * row[i];
  for (int o = 16; o > 0; o /= 2) sum += __shfl_down_sync(0xffffffff, sum, o);
  if (!(threadIdx.x % 32)) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 8) {
    sum = parts[threadIdx.x];
    for (int o = 4; o > 0; o /= 2) sum += __shfl_down_sync(0xff, sum, o);
    if (!threadIdx.x) *total = sum;
  }
  __syncthreads();
  float r = rsqrtf(total[0] / cols + eps);
  if (wide) {
    for (int i = threadIdx.x; i < cols / 4; i += 256) {
      float4 v = reinterpret_cast<const float4*>(row)[i];
      const float4 g = *reinterpret_cast<const float4*>(gamma + 4 * i);
      v.x *= r * g.x, v.y *= r * g.y, v.z *= r * g.z, v.w *= r * g.w;
      *(float4*)&out[4 * i] = v;
    }
    return;
  }
  for (int i = threadIdx.x; i < cols; i += 256) out[i] = row[i] * r * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, *x.shape, eps, grid=len(x), block=256)
    return y


# %% right: shuffles down, the first warp adds up, float4 views
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__device__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
  return v;
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[32];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float s = 0;
  bool four = cols % 4 == 0;
  const float4* x4 = reinterpret_cast<const float4*>(row);
  const float4* g4 = reinterpret_cast<const float4*>(gamma);
  float4* y4 = reinterpret_cast<float4*>(out);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i];
      s += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) s += row[i] * row[i];
  }
  s = warp_sum(s);
  if (lane == 0) parts[warp] = s;
  __syncthreads();
  if (warp == 0) {
    float v = lane < warps ? parts[lane] : 0.0f;
    v = warp_sum(v);
    if (lane == 0) parts[0] = v;
  }
  __syncthreads();
  float total = parts[0];
  float rstd = rsqrtf(total / cols + eps);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i], g = g4[i];
      y4[i] = make_float4(v.x * rstd * g.x, v.y * rstd * g.y, v.z * rstd * g.z, v.w * rstd * g.w);
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
  }

}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% right: a butterfly written out, float4 views
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__device__ float warp_sum(float v) {
  int lane = threadIdx.x & 31;
  v += __shfl_sync(0xffffffff, v, lane ^ 16);
  v += __shfl_sync(0xffffffff, v, lane ^ 8);
  v += __shfl_sync(0xffffffff, v, lane ^ 4);
  v += __shfl_sync(0xffffffff, v, lane ^ 2);
  v += __shfl_sync(0xffffffff, v, lane ^ 1);
  return v;
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[32];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float s = 0;
  bool four = cols % 4 == 0;
  const float4* x4 = reinterpret_cast<const float4*>(row);
  const float4* g4 = reinterpret_cast<const float4*>(gamma);
  float4* y4 = reinterpret_cast<float4*>(out);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i];
      s += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) s += row[i] * row[i];
  }
  s = warp_sum(s);
  if (lane == 0) parts[warp] = s;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < warps; w++) total += parts[w];
  float rstd = rsqrtf(total / cols + eps);
  if (four) {
    for (int i = threadIdx.x; i < cols / 4; i += blockDim.x) {
      float4 v = x4[i], g = g4[i];
      y4[i] = make_float4(v.x * rstd * g.x, v.y * rstd * g.y, v.z * rstd * g.z, v.w * rstd * g.w);
    }
  } else {
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
  }

}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y
