// Norms, SwiGLU, RoPE and products of a few rows in fp32, on a CPU, each in one pass.
//
// torch computes RMSNorm in six passes and RoPE in eight; for forty rows of 512 numbers, as a decode step has them,
// launching a pass takes longer than the pass itself. A product of one row uses each weight once, so memory bandwidth
// is its limit: weights are read in order and prefetched. Forward alone: generation needs no gradients.

#include "vector.h"

namespace {

using V = Vector<float>::type;
constexpr int LANES = Vector<float>::lanes;

// out = x / sqrt(mean(x^2) + eps) * weight, of x itself or of h = x + residual, which is stored.
void rms_norm(const float* x, const float* residual, const float* weight, float* h, float* out, int64_t n, float eps) {
    if (residual) {
        for (int64_t i = 0; i < n; ++i) h[i] = x[i] + residual[i];
        x = h;
    }
    V squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; ++k) {
            const V y = load(x + i + k * LANES);
            squares[k] += y * y;
        }
    float sum = total<float>((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < n; ++i) sum += x[i] * x[i];
    const float scale = 1 / std::sqrt(sum / n + eps);
    for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// out = silu(gate) * up
void swiglu(const float* gate, const float* up, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = gate[i], e = exponential(g < 0 ? g : -g);
        out[i] = g * ((g < 0 ? e : 1.0f) / (1 + e)) * up[i];
    }
}

// Rotates the first 2 * half channels of a head, copies the others.
void turn(const float* x, const float* cos, const float* sin, float* out, int64_t half, int64_t d, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * cos[i] - b * sin[i];
            out[2 * i + 1] = b * cos[i] + a * sin[i];
        }
    } else {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            out[i] = a * cos[i] - b * sin[i];
            out[half + i] = b * cos[i] + a * sin[i];
        }
    }
    if (d > 2 * half) std::memcpy(out + 2 * half, x + 2 * half, (d - 2 * half) * sizeof(float));
}

constexpr int64_t AHEAD = 1024;  // elements to prefetch: 4 KB, where the hardware's own prefetching ends

// y[r] = x[r] . w of R rows x.
template <int R>
void products(const float* x, const float* w, int64_t n, float* y, int64_t stride) {
    constexpr int K = R == 1 ? 4 : 2;  // independent sums of each row, which hide the latency of an FMA
    V sums[R][K] = {};
    int64_t c = 0;
    for (; c + K * LANES <= n; c += K * LANES) {
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) {
            __builtin_prefetch(w + c + k * LANES + AHEAD);
            const V v = load(w + c + k * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[r][k] += load(x + r * n + c + k * LANES) * v;
        }
    }
    for (int r = 0; r < R; ++r) {
        V all = sums[r][0];
        for (int k = 1; k < K; ++k) all += sums[r][k];
        float sum = total<float>(all);
        for (int64_t e = c; e < n; ++e) sum += x[r * n + e] * w[e];
        y[r * stride] = sum;
    }
}

constexpr int64_t ROWS = 16;  // rows that a thread takes at a time

template <typename Row>
void each_row(int64_t rows, int64_t threads, double elements, Row row) {
    share<float>((rows + ROWS - 1) / ROWS, threads, elements * 8, [&](int64_t piece, std::vector<float>&) {
        for (int64_t i = piece * ROWS; i < std::min(rows, (piece + 1) * ROWS); ++i) row(i);
    });
}

}  // namespace

// All dense, [rows, n]; residual and h may be null together.
MM_EXPORT mm_rms_norm(const void* x, const void* residual, const void* weight, void* h, void* out, int64_t rows,
                      int64_t n, double eps, int64_t threads, void* stream) {
    (void)stream;
    const float *from = static_cast<const float*>(x), *add = static_cast<const float*>(residual);
    float *sum = static_cast<float*>(h), *to = static_cast<float*>(out);
    each_row(rows, threads, double(rows) * n, [&](int64_t i) {
        rms_norm(from + i * n, add ? add + i * n : nullptr, static_cast<const float*>(weight),
                 sum ? sum + i * n : nullptr, to + i * n, n, static_cast<float>(eps));
    });
    return 0;
}

// Dense: x [rows, 2 n] = [gate, up], out [rows, n].
MM_EXPORT mm_swiglu(const void* x, void* out, int64_t rows, int64_t n, int64_t threads, void* stream) {
    (void)stream;
    const float* from = static_cast<const float*>(x);
    each_row(rows, threads, double(rows) * n * 4, [&](int64_t i) {
        swiglu(from + 2 * i * n, from + (2 * i + 1) * n, static_cast<float*>(out) + i * n, n);
    });
    return 0;
}

// x [tokens, heads, d] by strides of (token, head), with dense channels; cos and sin [tokens, half] and out are dense.
MM_EXPORT mm_rope(const void* x, const void* cos, const void* sin, void* out, int64_t tokens, int64_t heads, int64_t d,
                  int64_t half, int64_t token_stride, int64_t head_stride, int interleaved, int64_t threads,
                  void* stream) {
    (void)stream;
    const float *from = static_cast<const float*>(x), *c = static_cast<const float*>(cos), *s = static_cast<const float*>(sin);
    each_row(tokens, threads, double(tokens) * heads * d, [&](int64_t i) {
        for (int64_t h = 0; h < heads; ++h)
            turn(from + i * token_stride + h * head_stride, c + i * half, s + i * half,
                 static_cast<float*>(out) + (i * heads + h) * d, half, d, interleaved != 0);
    });
    return 0;
}

// What generation does between the product that makes queries, keys and values, and attention. packed [tokens, groups,
// shared + 2, d], cos and sin [tokens, half], q [tokens, groups, shared, d] and rows [tokens] are dense. Key and value of
// token i go into row rows[i] of all pages, by strides of (page, row of it, head) in elements.
MM_EXPORT mm_turn_and_keep(const void* packed, const void* cos, const void* sin, void* q, void* keys, void* values,
                           const void* rows, int64_t tokens, int64_t groups, int64_t shared, int64_t d, int64_t half,
                           int64_t page_size, int64_t key_page, int64_t key_row, int64_t key_head, int64_t value_page,
                           int64_t value_row, int64_t value_head, int interleaved, int64_t threads, void* stream) {
    (void)stream;
    const float *from = static_cast<const float*>(packed), *c = static_cast<const float*>(cos), *s = static_cast<const float*>(sin);
    float *to = static_cast<float*>(q), *k = static_cast<float*>(keys), *v = static_cast<float*>(values);
    each_row(tokens, threads, double(tokens) * groups * (shared + 2) * d, [&](int64_t i) {
        const int64_t where = static_cast<const int64_t*>(rows)[i], page = where / page_size, row = where % page_size;
        const float *x = from + i * groups * (shared + 2) * d, *ci = c + i * half, *si = s + i * half;
        for (int64_t g = 0; g < groups; ++g, x += (shared + 2) * d) {
            for (int64_t h = 0; h < shared; ++h)
                turn(x + h * d, ci, si, to + ((i * groups + g) * shared + h) * d, half, d, interleaved != 0);
            turn(x + shared * d, ci, si, k + page * key_page + row * key_row + g * key_head, half, d, interleaved != 0);
            std::memcpy(v + page * value_page + row * value_row + g * value_head, x + (shared + 1) * d, d * sizeof(float));
        }
    });
    return 0;
}

// y = x W^T + bias of 1 to 3 rows: x [rows, i], w [o, i], bias [o] or null, y [rows, o], all dense.
MM_EXPORT mm_product(const void* x, const void* w, const void* bias, void* y, int64_t rows, int64_t o, int64_t i,
                     int64_t threads, void* stream) {
    (void)stream;
    const float *from = static_cast<const float*>(x), *add = static_cast<const float*>(bias);
    float* to = static_cast<float*>(y);
    auto* multiply = rows == 1 ? products<1> : rows == 2 ? products<2> : products<3>;
    if (rows < 1 || rows > 3) return -1;
    each_row(o, threads, double(o) * i * rows / 8, [&](int64_t j) {
        multiply(from, static_cast<const float*>(w) + j * i, i, to + j, o);
        if (add)
            for (int64_t r = 0; r < rows; ++r) to[r * o + j] += add[j];
    });
    return 0;
}
