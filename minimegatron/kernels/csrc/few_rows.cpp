// RoPE into pages and products of a few rows in fp32, on a CPU, for a decode step.
//
// A product of one row uses each weight once, so memory bandwidth is its limit: weights are read in order and prefetched.
// Forward alone: generation needs no gradients.

#include "vector.h"

namespace {

using V = Vector<float>::type;
constexpr int LANES = Vector<float>::lanes;

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

}  // namespace

// What generation does between the product that makes queries, keys and values, and attention. packed [tokens, groups,
// shared + 2, d], cos and sin [tokens, half], q [tokens, groups, shared, d] and rows [tokens] are dense. Key and value of
// token i go into row rows[i] of all pages, by strides of (page, row of it, head) in elements.
MM_EXPORT mm_rope_and_keep(const void* packed, const void* cos, const void* sin, void* q, void* keys, void* values,
                           const void* rows, int64_t tokens, int64_t groups, int64_t shared, int64_t d, int64_t half,
                           int64_t page_size, int64_t key_page, int64_t key_row, int64_t key_head, int64_t value_page,
                           int64_t value_row, int64_t value_head, int interleaved, void* stream) {
    const float *from = static_cast<const float*>(packed), *c = static_cast<const float*>(cos), *s = static_cast<const float*>(sin);
    float *to = static_cast<float*>(q), *k = static_cast<float*>(keys), *v = static_cast<float*>(values);
    each_row(tokens, threads_of(stream), double(tokens) * groups * (shared + 2) * d * 8, [&](int64_t i) {
        const int64_t where = static_cast<const int64_t*>(rows)[i], page = where / page_size, row = where % page_size;
        const float *x = from + i * groups * (shared + 2) * d, *ci = c + i * half, *si = s + i * half;
        for (int64_t g = 0; g < groups; ++g, x += (shared + 2) * d) {
            for (int64_t h = 0; h < shared; ++h)
                turn(x + h * d, ci, si, 1.0f, to + ((i * groups + g) * shared + h) * d, half, d, interleaved != 0);
            turn(x + shared * d, ci, si, 1.0f, k + page * key_page + row * key_row + g * key_head, half, d, interleaved != 0);
            std::memcpy(v + page * value_page + row * value_row + g * value_head, x + (shared + 1) * d, d * sizeof(float));
        }
    });
    return 0;
}

// y = x W^T + bias of 1 to 3 rows: x [rows, i], w [o, i], bias [o] or null, y [rows, o], all dense.
MM_EXPORT mm_product(const void* x, const void* w, const void* bias, void* y, int64_t rows, int64_t o, int64_t i,
                     void* stream) {
    const float *from = static_cast<const float*>(x), *add = static_cast<const float*>(bias);
    float* to = static_cast<float*>(y);
    auto* multiply = rows == 1 ? products<1> : rows == 2 ? products<2> : products<3>;
    if (rows < 1 || rows > 3) return -1;
    each_row(o, threads_of(stream), double(o) * i * rows, [&](int64_t j) {
        multiply(from, static_cast<const float*>(w) + j * i, i, to + j, o);
        if (add)
            for (int64_t r = 0; r < rows; ++r) to[r * o + j] += add[j];
    });
    return 0;
}
