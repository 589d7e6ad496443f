from labkit.answers import Edit, Same

_REFUSED = (
    '    if cols > 16 * 256:\n        raise ValueError(f"a row of {cols} numbers does not fit into the registers of a '
    'block: at most 4096")\n'
)
WRONG = [
    Edit(_REFUSED, "", told="neither refused nor right"),
    Edit("if cols > 16 * 256:", "if cols >= 16 * 256:", told="up to 4096 there is room"),
    Edit("if cols > 16 * 256:", "if cols > 16 * 64:", told="up to 4096 there is room"),
    Edit("if cols > 16 * 256:", "if cols > 16 * 512:", told="neither refused nor right"),
    Edit("PER = 16;", "PER = 8;", told="expected | never written"),
    # refused when it is too late
    Edit(_REFUSED, "", ("block=256)\n", "block=256)\n    if cols > 4096:\n        raise ValueError(cols)\n"), told="refused after a launch"),
    # the row is read again
    Edit("out[i] = kept[k] * rstd", "out[i] = row[i] * rstd", told="it reads x 2 times"),
    # beyond the row
    Edit("kept[k] = i < cols ? row[i] : 0.0f;", "kept[k] = row[i];", told="it has | expected"),
    Edit("    if (i < cols) out[i]", "    out[i]", told="it has | times; once is enough"),
    # no value beyond the row
    Edit("kept[k] = i < cols ? row[i] : 0.0f;", "if (i < cols) kept[k] = row[i];", told="a variable that was given no value"),
    # neighbours: 16 numbers that stand together
    Edit("threadIdx.x + k * blockDim.x", "threadIdx.x * PER + k", told="neighbouring threads"),
    Edit("sum += kept[k] * kept[k];", "sum += kept[k];", told="not the square of the mean | expected"),
    Edit("block_sum(sum) / cols", "block_sum(sum)", told="divide the sum by cols"),
    Edit("kept[PER], sum = 0;", "kept[PER], sum;", told="a variable that was given no value"),
    Edit("    if cols > 16 * 256:\n", "    if rows > 16 * 256:\n", told="neither refused nor right"),
    # in local memory: one place after another, as many as the row needs
    Edit(
        "for (int k = 0; k < PER; ++k) {\n    int i = threadIdx.x + k * blockDim.x;\n    kept[k] = i < cols ? row[i] : 0.0f;",
        "for (int k = 0; k < (cols + 255) / 256; ++k) {\n    int i = threadIdx.x + k * blockDim.x;\n    kept[k] = i < cols ? row[i] : 0.0f;",
        told="kept[k]: this index is known only when the kernel runs",
    ),
    Edit(
        "kept[PER], sum = 0;",
        "kept[PER], sum = 0;\n  int n = 0;\n  for (int i = threadIdx.x; i < cols && cols <= 4096; i += blockDim.x) kept[n++] = row[i];",
        ("    kept[k] = i < cols ? row[i] : 0.0f;", "    if (i >= cols) kept[k] = 0;"),
        told="kept[n++]: this index is known only when the kernel runs",
    ),
]

RIGHT = [
    # a wider row takes the other way: what does not fit is read again
    Edit(
        _REFUSED,
        "",
        ("  float rstd = rsqrtf(", "  for (int i = threadIdx.x + PER * blockDim.x; i < cols; i += blockDim.x) sum += row[i] * row[i];\n  float rstd = rsqrtf("),
        ("    if (i < cols) out[i] = kept[k] * rstd * gamma[i];\n  }", "    if (i < cols) out[i] = kept[k] * rstd * gamma[i];\n  }\n"
         "  for (int i = threadIdx.x + PER * blockDim.x; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];"),
    ),
    # more threads, fewer numbers each
    Edit("PER = 16;", "PER = 4;", ("block=256", "block=1024")),
    Edit("kept[k] = i < cols ? row[i] : 0.0f;", "kept[k] = 0;\n    if (i < cols) kept[k] = row[i];"),
    # the wide row by torch
    Edit(_REFUSED, "    if cols > 4096:\n        return torch.nn.functional.rms_norm(x, (cols,), gamma, eps)\n"),
    # a loop that ends early has a known bound, too
    Edit(
        "    int i = threadIdx.x + k * blockDim.x;\n    if (i < cols) out[i]",
        "    const int i = threadIdx.x + k * blockDim.x;\n    if (i >= cols) break;\n    out[i]",
    ),
]

EQUIVALENT = [Same("line 30: `<=` for `<`: `<`", "the number after the last is of a column that no row has")]


# %% right: float4, and a template for the room
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

template <int PACKS> __device__ void row_of(const float* row, const float* gamma, float* out, int cols, float eps) {
  float4 kept[PACKS];
  float sum = 0;
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int i = 4 * (threadIdx.x + k * blockDim.x);
    kept[k] = make_float4(0, 0, 0, 0);
    if (i < cols) kept[k] = *reinterpret_cast<const float4*>(row + i);
    sum += kept[k].x * kept[k].x + kept[k].y * kept[k].y + kept[k].z * kept[k].z + kept[k].w * kept[k].w;
  }
  const float r = rsqrtf(block_sum(sum) / cols + eps);
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int i = 4 * (threadIdx.x + k * blockDim.x);
    if (i < cols) {
      out[i] = kept[k].x * r * gamma[i], out[i + 1] = kept[k].y * r * gamma[i + 1];
      out[i + 2] = kept[k].z * r * gamma[i + 2], out[i + 3] = kept[k].w * r * gamma[i + 3];
    }
  }
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int cols, float eps) {
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  if (cols % 4 == 0) { row_of<4>(row, gamma, out, cols, eps); return; }
  float kept[16], sum = 0;
  for (int k = 0; k < 16; ++k) {
    const int i = threadIdx.x + 256 * k;
    kept[k] = i < cols ? row[i] : 0;
    sum += kept[k] * kept[k];
  }
  const float r = rsqrtf(block_sum(sum) / cols + eps);
  for (int k = 0; k < 16; ++k)
    if (threadIdx.x + 256 * k < cols) out[threadIdx.x + 256 * k] = kept[k] * r * gamma[threadIdx.x + 256 * k];
}
""")


def norm(x, gamma, eps):
    if x.shape[1] > 4096:
        raise ValueError("too wide")
    y = torch.empty_like(x)
    kernel(x, gamma, y, x.shape[1], eps, grid=len(x), block=256)
    return y


# %% right: two kernels, the wide one reads twice
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
  float kept[8];
  x += (size_t)blockIdx.x * cols, y += (size_t)blockIdx.x * cols;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (int i = k * 512 + threadIdx.x; i < cols) kept[k] = x[i], sum = fmaf(kept[k], kept[k], sum);
  sum = 1 / sqrtf(block_sum(sum) / cols + eps);
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (int i = k * 512 + threadIdx.x; i < cols) y[i] = kept[k] * sum * gamma[i];
}
""")
wide = Kernel(r"""
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
  x += (size_t)blockIdx.x * cols, y += (size_t)blockIdx.x * cols;
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += x[i] * x[i];
  sum = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) y[i] = x[i] * sum * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    (kernel if x.shape[1] <= 4096 else wide)(x, gamma, y, x.shape[1], eps, grid=x.shape[0], block=512)
    return y


# %% right: the row in shared memory, one number a thread at a time
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
  extern __shared__ float kept[];
  const float* row = x + (long long)blockIdx.x * cols;
  float sum = 0;
  for (int i = threadIdx.x; i < cols; i += blockDim.x) {
    kept[i] = row[i];
    sum += kept[i] * kept[i];
  }
  float rstd = rsqrtf(block_sum(sum) / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) y[(long long)blockIdx.x * cols + i] = kept[i] * rstd * gamma[i];
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, cols, eps, grid=rows, block=256, shared_mem=4 * cols)
    return y


# %% wrong: the norm of torch where the row is wide
# told: no kernel ran
import torch

from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
""")


def norm(x, gamma, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma
