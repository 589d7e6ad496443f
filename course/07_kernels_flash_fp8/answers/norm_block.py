from labkit.answers import Edit

WRONG = [
    Edit("float sum = 0;", "float sum;", told="a variable that was given no value"),
    Edit("grid=rows, block=256", "grid=1, block=256", told="a block of 256 threads for each row"),
    # the row in four registers: right up to 1024 columns
    Edit(
        "  float sum = 0;",
        "  float keep[4];\n  float sum = 0;",
        ("sum += v * v;", "sum += v * v; if (i / 256 < 4) keep[i / 256] = v;"),
        ("out[i] = row[i] * rstd", "out[i] = keep[i / 256 % 4] * rstd"),
        told="expected",
    ),
    # one thread does all
    Edit(
        "  float sum = 0;",
        """  if (threadIdx.x) return;
  float all = 0;
  for (int i = 0; i < cols; ++i) all += row[i] * row[i];
  for (int i = 0; i < cols; ++i) out[i] = row[i] * rsqrtf(all / cols + eps) * gamma[i];
  return;
  float sum = 0;""",
        told="no thread reads from shared memory",
    ),
    Edit(
        """  __syncthreads();
  float rstd""",
        "  float rstd",
        told="a race",
    ),
    Edit(
        """    __syncthreads();
    if""",
        "    if",
        told="a race",
    ),
    Edit(
        """    __syncthreads();
    if (threadIdx.x < s) parts""",
        "    if (threadIdx.x < s) __syncthreads(), parts",
        told="all threads must meet the same one",
    ),
    Edit(
        """int i = threadIdx.x; i < cols; i += blockDim.x) {
    float v""",
        (
            "int i = threadIdx.x * ((cols + 255) / 256); i < min(cols, (int)(threadIdx.x + 1) * ((cols + "
            "255) / 256)); ++i) {\n"
            "    float v"
        ),
        told="neighbouring threads",
    ),
    Edit(
        "for (int i = threadIdx.x; i < cols; i += blockDim.x) out",
        "for (int i = 0; i < cols; ++i) out",
        told="times; once is enough",
    ),
    # the upper half is never added
    Edit("s = blockDim.x / 2", "s = blockDim.x / 4", told="expected"),
    # one thread adds up
    Edit(
        """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
        """__syncthreads();
  if (threadIdx.x == 0) for (int i = 1; i < 256; ++i) parts[0] += parts[i];""",
        told="in a tree",
    ),
    # all threads add to one number, at once
    Edit(
        """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
        """__syncthreads();
  if (threadIdx.x > 0) parts[0] += sum;""",
        told="a race",
    ),
    Edit(
        "    __syncthreads();\n    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];",
        "    if (threadIdx.x < s) { __syncthreads(); parts[threadIdx.x] += parts[threadIdx.x + s]; }\n"
        "    else __syncthreads();",
        told="all threads must meet the same one",
    ),
    Edit("parts[256];", "parts[200];", told="it has 200 numbers"),
    # all add to one word, in turn
    Edit(
        """  parts[threadIdx.x] = sum;
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }
""",
        """  if (threadIdx.x == 0) parts[0] = 0;
  __syncthreads();
  atomicAdd(&parts[0], sum);
""",
        told="in a tree half of the threads",
    ),
    # a warp needs no barrier: true before Volta
    Edit("    __syncthreads();\n    if", "    if (s >= 32) __syncthreads();\n    if", told="a race"),
    # only thread 0 knows the root
    Edit(
        "  float rstd = rsqrtf(parts[0] / cols + eps);",
        "  float rstd = 0; if (threadIdx.x == 0) rstd = rsqrtf(parts[0]);",
    ),
    Edit(
        "  __syncthreads();\n  float",
        "  if (threadIdx.x == 0) __syncthreads();\n  float",
        told="did not meet the barrier",
    ),
]

RIGHT = [
    # neighbours first: s = 1, 2, 4, ...
    Edit(
        """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
        """for (int s = 1; s < blockDim.x; s *= 2) {
    __syncthreads();
    if (threadIdx.x % (2 * s) == 0) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
    ),
    # groups of 16 threads, then one of 16
    Edit(
        """for (int s = blockDim.x / 2; s > 0; s /= 2) {
    __syncthreads();
    if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
  }""",
        """__syncthreads();
  if (threadIdx.x % 16 == 0) for (int i = 1; i < 16; ++i) parts[threadIdx.x] += parts[threadIdx.x + i];
  __syncthreads();
  if (threadIdx.x == 0) for (int i = 16; i < 256; i += 16) parts[0] += parts[i];""",
    ),
]


# %% right: a loop over rows that runs once, the tree in shuffles of one warp, the root by one thread
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""__device__ float square(float v) { return v * v; }
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {

  __shared__ float parts[256];
  __shared__ float rstd;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += square(x[row * cols + i]);
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      sum = 0;
      for (int i = threadIdx.x; i < blockDim.x; i += 32) sum += parts[i];
      for (int o = 16; o; o >>= 1) sum += __shfl_down_sync(0xffffffff, sum, o);
      if (threadIdx.x == 0) rstd = 1 / sqrtf(sum / cols + eps);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[row * cols + i] = x[row * cols + i] * rstd * gamma[i];
    __syncthreads();
  }
}
""")

def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% right: shuffles of half a warp at the end; an atomic sum of the warps; one shared number
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__device__ float half_warp_sum(float v) {
  for (int o = 8; o > 0; o >>= 1) v += __shfl_down_sync(0xffff, v, o, 16);
  return v;
}
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[16][16], total;
  __shared__ float rstd;
  const int t = threadIdx.x;
  const float* row = x + (size_t)blockIdx.x * cols;
  float sum = 0.0f;
  for (int i = t; i < cols; i += blockDim.x) sum += row[i] * row[i];
  parts[t / 16][t % 16] = sum;
  if (t == 0) total = 0;
  __syncthreads();
  if (t < 16) {
    float mine = 0;
    for (int k = 0; k < 16; ++k) mine += parts[k][t];
    mine = half_warp_sum(mine);
    if (t == 0) atomicAdd(&total, mine);
    __syncwarp(0xffff);
    if (t == 3) rstd = rsqrtf(total / cols + eps);
  }
  __syncthreads();
  for (int i = t; i < cols; i += blockDim.x) y[(size_t)blockIdx.x * cols + i] = row[i] * rstd * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, *x.shape, eps, grid=len(x), block=256)
    return y


# %% right: a butterfly in shared memory, two arrays in turn
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  __shared__ float other[256];
  int t = threadIdx.x;
  float part = 0;
  for (int i = t; i < cols; i += blockDim.x) part += row[i] * row[i];
  float *a = parts, *b = other;
  a[t] = part;
  __syncthreads();
  for (int s = 1; s < 256; s <<= 1) {
    b[t] = a[t] + a[t ^ s];
    __syncthreads();
    float* c = a; a = b; b = c;
  }
  float rstd = 1.0f / sqrtf(a[t] / cols + eps);
  for (int i = t; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% right: shuffles in the warp, then a sum over eight
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int t = threadIdx.x;
  float part = 0;
  for (int i = t; i < cols; i += blockDim.x) part += row[i] * row[i];
  for (int o = 16; o; o /= 2) part += __shfl_xor_sync(0xffffffff, part, o);
  if (t % 32 == 0) parts[t / 32] = part;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < 8; w++) sum += parts[w];
  float rstd = rsqrtf(sum / cols + eps);
  for (int i = t; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% wrong: counts are given
# told: 256 times; once is enough | reads x | norm must return
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  float sum = 0;
  const float* row = x + blockIdx.x * cols;
  for (int i = 0; i < cols; ++i) sum += row[i] * row[i];
  if (threadIdx.x == 0)
    for (int i = 0; i < cols; ++i) y[blockIdx.x * cols + i] = row[i] * rsqrtf(sum / cols + eps) * gamma[i];
}
""")


def norm(x, gamma, eps):
    y = torch.empty_like(x)
    kernel(x, gamma, y, *x.shape, eps, grid=len(x), block=256)
    kernel.counts = {"x": {"read": 0, "loads": 1, "served": 1, "share": 1.0}, "y": {}, "barriers": 0}
    return y


# %% wrong: four blocks for all rows
# told: a block of 256 threads for each row
import torch
from course.lab07.cuda import Kernel

kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += x[row * cols + i] * x[row * cols + i];
    parts[threadIdx.x] = sum;
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
      __syncthreads();
      if (threadIdx.x < s) parts[threadIdx.x] += parts[threadIdx.x + s];
    }
    __syncthreads();
    float rstd = rsqrtf(parts[0] / cols + eps);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[row * cols + i] = x[row * cols + i] * rstd * gamma[i];
    __syncthreads();
  }
}
""")


def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=4, block=256)
    return y


# %% wrong: thread 0 writes the row
# told: neighbouring threads must read
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int t = threadIdx.x;
  float part = 0;
  for (int i = t; i < cols; i += blockDim.x) part += row[i] * row[i];
  parts[t] = part;
  __syncthreads();
  for (int s = 128; s > 0; s /= 2) {
    if (t < s) parts[t] += parts[t + s];
    __syncthreads();
  }
  float rstd = rsqrtf(parts[0] / cols + eps);
  if (t == 0)
    for (int i = 0; i < cols; i++) out[i] = row[i] * rstd * gamma[i];
}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y


# %% wrong: threads without a column return
# told: did not meet the barrier
import torch
from course.lab07.cuda import Kernel
kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  __shared__ float parts[256];
  const float* row = x + (long long)blockIdx.x * cols;
  float* out = y + (long long)blockIdx.x * cols;
  int t = threadIdx.x;
  if (t >= cols) return;
  float part = 0;
  for (int i = t; i < cols; i += blockDim.x) part += row[i] * row[i];
  parts[t] = part;
  __syncthreads();
  for (int s = 128; s > 0; s /= 2) {
    if (t < s) parts[t] += parts[t + s];
    __syncthreads();
  }
  float rstd = rsqrtf(parts[0] / cols + eps);
  for (int i = t; i < cols; i += blockDim.x) out[i] = row[i] * rstd * gamma[i];
}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=rows, block=256)
    return y
