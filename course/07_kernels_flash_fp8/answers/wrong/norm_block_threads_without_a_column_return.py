# told: did not meet the barrier
import torch
from labkit.cuda import Kernel
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
