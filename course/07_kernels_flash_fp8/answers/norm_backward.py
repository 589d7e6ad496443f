from labkit.answers import Edit, Same

WRONG = [
    Edit("  float of_gamma[PER] = {};", "  float of_gamma[PER];", told="a variable that was given no value"),
    # the last row of each block
    Edit("of_gamma[k] += kept", "of_gamma[k] = kept", told="the sum goes on from row to row"),
    Edit("kept_dy[k] * kept_x[k] * rstd;", "kept_dy[k] * kept_x[k];", told="the normed row, is asked for"),
    Edit("of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;", "if (i < cols) of_gamma[k] += kept_dy[k] * gamma[i] * kept_x[k] * rstd;", told="gamma is a factor of dx"),
    Edit("of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;", "of_gamma[k] += kept_dy[k];", told="gradient of an added bias"),
    Edit("p < parts;", "p < 1;", told="only the rows of block 0"),
    Edit("p < parts;", "p < parts - 1;", told="expected"),
    Edit("dgamma[i] = sum;", "dgamma[i] = sum / parts;", told="expected"),
    Edit("  if (i >= cols) return;\n", "", told="it has"),
    Edit("grid=(cols + 255) // 256", "grid=1", told="it was never written"),
    Edit("    columns_kernel(partial, dgamma, blocks, cols, grid=(cols + 255) // 256, block=256)\n", "    dgamma = partial.sum(0)\n", told="dgamma must be what a kernel wrote"),
    # all blocks write one row
    Edit("partial[(long long)blockIdx.x * cols + i] = of_gamma[k];", "partial[i] = of_gamma[k];", told="a race | other bits | expected"),
    # one row of all rows each: a buffer as large as x
    Edit(
        "    if (i < cols) partial[(long long)blockIdx.x * cols + i] = of_gamma[k];",
        "    (void)i;",
        ("of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;", "of_gamma[k] = kept_dy[k] * kept_x[k] * rstd;\n      if (i < cols) partial[at + i] = of_gamma[k];"),
        ("torch.empty(blocks, cols, device=x.device)", "torch.empty_like(x)"),
        ("partial, dgamma, blocks, cols", "partial, dgamma, rows, cols"),
        told="go through memory between the launches",
    ),
    # a second kernel with neighbours a row apart
    Edit(
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= cols) return;\n  float sum = 0;\n"
        "  for (int p = 0; p < parts; ++p) sum += partial[(long long)p * cols + i];\n  dgamma[i] = sum;",
        "  for (int i = blockIdx.x; i < cols; i += gridDim.x) {\n    float sum = 0;\n"
        "    for (int p = threadIdx.x; p < parts; p += 32) sum += partial[(long long)p * cols + i];\n"
        "    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffff, sum, o);\n"
        "    if (threadIdx.x == 0) dgamma[i] = sum;\n  }",
        ("grid=(cols + 255) // 256, block=256)", "grid=cols, block=32)"),
        told="neighbouring columns",
    ),
    # a row of partial after each row of x
    Edit(
        "of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;",
        "of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;\n      if (i < cols) partial[(long long)blockIdx.x * cols + i] = of_gamma[k];",
        told="once is enough, when the block has done its last row",
    ),
    # one block for all rows
    Edit("eps, grid=blocks, block=256)", "eps, grid=1, block=256)", ("partial, dgamma, blocks, cols", "partial, dgamma, 1, cols"), told="the first kernel has 1 of"),
]

RIGHT = [
    # fewer blocks than allowed
    Edit("    rows_kernel(", "    blocks = min(blocks, rows)\n    rows_kernel(", ("torch.empty(blocks, cols, device=x.device)", "torch.empty(min(blocks, rows), cols)")),
    # the sum begins with the first row
    Edit("of_gamma[k] += kept_dy[k] * kept_x[k] * rstd;", "of_gamma[k] = fmaf(kept_dy[k] * rstd, kept_x[k], of_gamma[k]);"),
    # the last one first
    Edit("for (int p = 0; p < parts; ++p)", "for (int p = parts - 1; p >= 0; --p)", ("block=256)\n    return", "block=256)\n    return")),
    # a loop over columns, in one block
    Edit(
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= cols) return;\n  float sum = 0;\n"
        "  for (int p = 0; p < parts; ++p) sum += partial[(long long)p * cols + i];\n  dgamma[i] = sum;",
        "  for (int i = threadIdx.x; i < cols; i += blockDim.x) {\n    float sum = 0;\n"
        "    for (int p = 0; p < parts; ++p) sum += partial[p * cols + i];\n    dgamma[i] = sum;\n  }",
        ("grid=(cols + 255) // 256, block=256)", "grid=1, block=128)"),
    ),
]

EQUIVALENT = [
    Same("line 43: `<=` for `<`: `<`", "the number after the last is of a column that no row has"),
    Same("columns_kernel(partial, dgamma, blocks, cols, grid=(cols + 255) // 255, block=256)", "a block too many does nothing"),
    Same("columns_kernel(partial, dgamma, blocks, cols, grid=(cols + 256) // 256, block=256)", "a block too many does nothing"),
    Same("columns_kernel(partial, dgamma, blocks, cols, grid=(cols + 255) // 256, block=257)", "threads too many do nothing"),
    Same("columns_kernel(partial, dgamma, blocks, cols, grid=(-(-(cols + 255) // 256)), block=256)", "a block too many does nothing"),
]



# %% wrong: each block adds to dgamma in memory
# told: in the order in which the blocks come
import torch

from course.lab07.cuda import Kernel

rows_kernel = Kernel(r"""
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) v += parts[w];
  return v;
}

__global__ void backward(const float* dy, const float* x, const float* gamma, float* dx, float* dgamma, int rows, int cols, float eps) {
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const float* mine = x + row * cols;
    const float* d = dy + row * cols;
    float squares = 0, products = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) squares += mine[i] * mine[i], products += d[i] * gamma[i] * mine[i];
    float rstd = rsqrtf(block_sum(squares) / cols + eps), mean = block_sum(products) * rstd / cols;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
      dx[row * cols + i] = rstd * (d[i] * gamma[i] - mine[i] * rstd * mean);
      atomicAdd(dgamma + i, d[i] * mine[i] * rstd);
    }
  }
}
""")


def norm_backward(dy, x, gamma, eps, blocks):
    dx, dgamma = torch.empty_like(x), torch.zeros_like(gamma)
    rows_kernel(dy, x, gamma, dx, dgamma, *x.shape, eps, grid=blocks, block=256)
    return dx, dgamma
