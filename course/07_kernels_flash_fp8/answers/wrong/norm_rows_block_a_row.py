# told: was never written
import torch
from labkit.cuda import Kernel
kernel = Kernel(r"""
__global__ void rms_norm(const float* x, const float* gamma, float* y, int rows, int cols, float eps) {
  int row = blockIdx.x;
  if (row >= rows) return;
  float sum = 0;
  for (int i = 0; i < cols; i++) sum += x[row * cols + i] * x[row * cols + i];
  float rstd = rsqrtf(sum / cols + eps);
  for (int i = threadIdx.x; i < cols; i += blockDim.x) y[row * cols + i] = x[row * cols + i] * rstd * gamma[i];
}
""")
def norm(x, gamma, eps):
    rows, cols = x.shape
    y = torch.empty_like(x)
    kernel(x, gamma, y, rows, cols, eps, grid=(rows + 63) // 64, block=64)
    return y
