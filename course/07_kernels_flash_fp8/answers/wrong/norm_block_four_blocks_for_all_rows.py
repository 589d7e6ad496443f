# told: a block of 256 threads for each row
import torch
from labkit.cuda import Kernel

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
