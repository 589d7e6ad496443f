// Cross entropy of this rank's columns of the vocabulary on a CPU: the formulas of cross_entropy.cu.
//
// A row of logits is read for its maximum and, still in the cache, again for the sum of exp(z - max). Nothing as large as
// the logits is written before their gradient. torch writes exp(z - max) too, in four passes over memory.
#include "vector.h"

namespace {

template <typename T, typename A>
void statistics(const T* z, int64_t column, A* top, A* sum, A* picked, A* spread, int64_t real) {
    constexpr int64_t SIDE = 32;
    A side[SIDE], m = -std::numeric_limits<A>::infinity();
    std::fill_n(side, SIDE, m);
    int64_t i = 0;
    for (; i + SIDE <= real; i += SIDE)
#pragma GCC unroll 32
        for (int64_t j = 0; j < SIDE; ++j) side[j] = wide(z[i + j]) > side[j] ? wide(z[i + j]) : side[j];
    for (; i < real; ++i) m = wide(z[i]) > m ? wide(z[i]) : m;
    for (int64_t j = 0; j < SIDE; ++j) m = side[j] > m ? side[j] : m;
    const A all = sum_over<A>(real, [&](int64_t c) { return wide(z[c]); });
    if (std::isnan(all)) {  // a NaN, which no comparison has found, or both infinities
        bool none = false;
        for (int64_t c = 0; c < real; ++c) none |= std::isnan(wide(z[c]));
        if (none) m = all;
    }
    *top = m;
    *sum = sum_over<A>(real, [&](int64_t c) {  // equal also where both are infinite
        const A v = wide(z[c]);
        return v == m ? A(1) : exponential(v - m);
    });
    *spread = all;
    *picked = column >= 0 && column < real ? wide(z[column]) : A(0);
}

template <typename T, typename A>
void gradient(const T* z, int64_t column, A lse, A dloss, T* dz, int64_t width, int64_t real, A hit, A spread) {
    const A picked = column >= 0 && column < real ? wide(z[column]) : A(0);  // before dz, which may be z, is written
    for (int64_t i = 0; i < real; ++i) put((exponential(wide(z[i]) - lse) - spread) * dloss, dz + i);
    for (int64_t i = real; i < width; ++i) put(A(0), dz + i);
    if (column >= 0 && column < real) put((exponential(picked - lse) - spread - hit) * dloss, dz + column);
}

}  // namespace

MM_EXPORT mm_cross_entropy_statistics(const void* z, const void* target, void* top, void* sum, void* picked, void* spread,
                                      int64_t rows, int64_t width, int64_t first, int64_t real, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(rows, threads_of(stream), double(rows) * real * 32, [&](int64_t i) {
            statistics<T, A>((const T*)z + i * width, ((const int64_t*)target)[i] - first, (A*)top + i, (A*)sum + i,
                             (A*)picked + i, (A*)spread + i, real);
        });
    });
}

// dz may be z itself.
MM_EXPORT mm_cross_entropy_gradient(const void* z, const void* target, const void* lse, const void* dloss, void* dz, int64_t rows,
                                    int64_t width, int64_t first, int64_t real, double hit, double spread, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(rows, threads_of(stream), double(rows) * width * 32, [&](int64_t i) {
            gradient<T, A>((const T*)z + i * width, ((const int64_t*)target)[i] - first, ((const A*)lse)[i], ((const A*)dloss)[i],
                           (T*)dz + i * width, width, real, (A)hit, (A)spread);
        });
    });
}
