// Products of a few rows with a matrix of packed weights, on a CPU: y = x W'^T, w' = q * scale.
//
// A thread takes 16 rows of W, dequantises them into the L1 cache and multiplies all rows of x by them, so each word is
// read from memory once: memory bandwidth limits a product with few rows. Sums are in fp32.
//
// A word of 32 bits holds 8 or 4 elements, the first in the lowest bits, each as q + 2^(bits - 1). Every row begins with
// a new word. A group of columns shares a scale. Of a matrix cut over ranks, the first column here is number `first` of
// the whole row, which may lie within a group.

#include "vector.h"
#if defined(__AVX512F__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own header
#include <immintrin.h>
#endif

namespace {

using V = Vector<float>::type;
constexpr int LANES = Vector<float>::lanes;
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

const uint32_t SHIFTS[16] = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
const uint32_t UPPER[16] = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
constexpr int64_t ROWS = 16;  // rows of W that a thread takes at a time

// Elements k .. k + LANES - 1 of a row; k is a multiple of min(8, LANES).
template <int bits>
inline V elements(const uint32_t* words, int64_t k) {
    if constexpr (bits == 8) {
        Words q;
        const uint8_t* from = reinterpret_cast<const uint8_t*>(words) + k;
        for (int l = 0; l < LANES; ++l) q[l] = from[l];
        return __builtin_convertvector(q, V) - 128.0f;
    } else {
        // 8 lanes share a word, and each shifts its own bits out of it.
        const int64_t in_word = LANES < 8 ? k % 8 : 0;
        Words shift, upper, word = Words{} + words[k / 8];
        std::memcpy(&shift, SHIFTS + in_word, WIDTH);
        if constexpr (LANES > 8) {
            std::memcpy(&upper, UPPER, WIDTH);
            word = (word & ~upper) | ((Words{} + words[k / 8 + 1]) & upper);
        }
        return __builtin_convertvector((word >> shift) & 15u, V) - 8.0f;
    }
}

template <int bits>
inline float element(const uint32_t* words, int64_t k) {
    const uint32_t q = words[k * bits / 32] >> (k * bits % 32) & ((1u << bits) - 1);
    return static_cast<float>(q) - (1 << (bits - 1));
}

// Round to the nearest bf16.
inline float rounded(float x) {
    uint32_t raw;
    std::memcpy(&raw, &x, 4);
    raw = (raw + 0x7fff + (raw >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&x, &raw, 4);
    return x;
}

#if defined(__AVX512F__)
// 128 elements of 4 bits, each looked up in a table of the sixteen values that it can have.
inline void looked_up(const uint32_t* words, const float* table, float* out) {
    const __m512i all = _mm512_loadu_si512(words), shifts = _mm512_loadu_si512(SHIFTS);
    const __m512i upper = _mm512_srli_epi32(_mm512_loadu_si512(UPPER), 31);  // 0 for 8 lanes, 1 for 8
    const __m512 numbers = _mm512_loadu_ps(table);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512i word = _mm512_permutexvar_epi32(_mm512_add_epi32(upper, _mm512_set1_epi32(2 * i)), all);
        _mm512_storeu_ps(out + 16 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(word, shifts), numbers));
    }
}
#endif

struct Matrix {
    const uint32_t* words;
    const float* scales;
    int64_t columns, words_of_row, groups, group, first;
    bool round;

    // Row `row` dequantised.
    template <int bits>
    void numbers(int64_t row, float* out) const {
        const uint32_t* from = words + row * words_of_row;
        const float* scale = scales + row * groups;
        for (int64_t k = 0, end; k < columns; k = end, ++scale) {
            end = std::min(columns, group ? k + group - (first + k) % group : columns);
            int64_t at = k;
            for (; at < end && at % 8; ++at) out[at] = element<bits>(from, at) * *scale;
#if defined(__AVX512F__)
            if (bits == 4 && at + 128 <= end) {
                float table[16];
                for (int q = 0; q < 16; ++q) table[q] = (q - 8) * *scale;
                for (; at + 128 <= end; at += 128) looked_up(from + at / 8, table, out + at);
            }
#endif
            for (; at + std::max(LANES, 8) <= end; at += LANES) store<float>(elements<bits>(from, at) * *scale, out + at);
            for (; at < end; ++at) out[at] = element<bits>(from, at) * *scale;
        }
        if (round)
            for (int64_t k = 0; k < columns; ++k) out[k] = rounded(out[k]);
    }

    template <int bits>
    void block(int64_t row, int64_t count, float* out) const {
        for (int64_t r = 0; r < count; ++r) numbers<bits>(row + r, out + r * columns);
    }
};

// y[:, row .. row + count) for n rows of x.
void multiply(const float* x, int64_t n, const float* w, int64_t columns, int64_t count, float* y, int64_t stride) {
    int64_t i = 0;
    auto some = [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        for (; i + R <= n; i += R) {
            int64_t j = 0;
            for (; j + 4 <= count; j += 4)
                dots<R, 4>(x + i * columns, w + j * columns, columns, columns, y + i * stride + j, stride);
            for (; j < count; ++j)
                dots<R, 1>(x + i * columns, w + j * columns, columns, columns, y + i * stride + j, stride);
        }
    };
#if defined(__AVX512F__)
    some(std::integral_constant<int, 4>{});
#endif
    some(std::integral_constant<int, 2>{});
    some(std::integral_constant<int, 1>{});
}

template <int bits>
void linear(const float* x, const Matrix& m, const float* bias, float* y, int64_t n, int64_t rows, int64_t threads) {
    share<float>((rows + ROWS - 1) / ROWS, threads, double(n + 4) * rows * m.columns, [&](int64_t piece, std::vector<float>& room) {
        const int64_t row = piece * ROWS, count = std::min(ROWS, rows - row);
        room.resize(ROWS * m.columns);
        m.block<bits>(row, count, room.data());
        multiply(x, n, room.data(), m.columns, count, y + row, rows);
        if (bias)
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < count; ++j) y[i * rows + row + j] += bias[row + j];
    });
}

}  // namespace

// x [n, columns], y [n, rows], bias [rows] or null, scales [rows, groups] and words [rows, words_of_row], all dense.
// group 0: one scale for a row. round: dequantised weights are rounded to bf16, the dtype of the stored scales.
MM_EXPORT mm_quantized_linear(const void* x, const void* words, const void* scales, const void* bias, void* y, int64_t n,
                              int64_t rows, int64_t columns, int64_t words_of_row, int64_t groups, int64_t group,
                              int64_t first, int round, int bits, void* stream) {
    const int64_t threads = threads_of(stream);
    const Matrix m{static_cast<const uint32_t*>(words), static_cast<const float*>(scales), columns, words_of_row, groups,
                   group, first, round != 0};
    auto* to_multiply = bits == 4 ? linear<4> : bits == 8 ? linear<8> : nullptr;
    if (!to_multiply) return -1;
    to_multiply(static_cast<const float*>(x), m, static_cast<const float*>(bias), static_cast<float*>(y), n, rows, threads);
    return 0;
}

// Rows first_row .. first_row + count of the matrix, dequantised: out [count, columns].
MM_EXPORT mm_dequantize(const void* words, const void* scales, void* out, int64_t first_row, int64_t count,
                        int64_t columns, int64_t words_of_row, int64_t groups, int64_t group, int64_t first, int round,
                        int bits, void* stream) {
    const int64_t threads = threads_of(stream);
    const Matrix m{static_cast<const uint32_t*>(words), static_cast<const float*>(scales), columns, words_of_row, groups,
                   group, first, round != 0};
    if (bits != 4 && bits != 8) return -1;
    share<float>((count + ROWS - 1) / ROWS, threads, double(count) * columns * 4, [&](int64_t piece, std::vector<float>&) {
        const int64_t at = piece * ROWS, some = std::min(ROWS, count - at);
        float* to = static_cast<float*>(out) + at * columns;
        bits == 4 ? m.block<4>(first_row + at, some, to) : m.block<8>(first_row + at, some, to);
    });
    return 0;
}
