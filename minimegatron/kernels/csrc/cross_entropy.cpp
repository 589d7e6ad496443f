// Cross entropy of this rank's columns of the vocabulary on a CPU: the formulas of cross_entropy.cu.
//
// A row of logits is read for its maximum and, still in the cache, again for the sum of exp(z - max). Nothing as large as
// the logits is written before their gradient. torch writes exp(z - max) too, in four passes over memory.
#include "vector.h"

namespace {

template <typename T, typename A>
void statistics(const T* z, int64_t column, A* top, A* sum, A* picked, A* spread, int64_t real) {
    const A none = -std::numeric_limits<A>::infinity();
    Vec<A> high = Vec<A>{} + none, also = high;  // two, or each comparison would wait for the one before
    const A all = sum_over<A>(real, [&](int64_t i, int64_t left) {
        const Vec<A> x = load(z + i, left), seen = left < L<A> ? first(left, x, none) : x;
        high = seen > high ? seen : high;
        std::swap(high, also);
        return x;
    });
    high = high > also ? high : also;
    A m = none;
    for (int i = 0; i < L<A>; ++i) m = high[i] > m ? high[i] : m;
    if (std::isnan(all)) {  // a NaN, which no comparison has found, or both infinities
        bool nan = false;
        for (int64_t c = 0; c < real; ++c) nan |= std::isnan(wide(z[c]));
        if (nan) m = all;
    }
    *top = m;
    *sum = sum_over<A>(real, [&](int64_t i, int64_t left) {  // equal also where both are infinite
        const Vec<A> x = load(z + i, left);
        return x == m ? Vec<A>{} + 1 : power((x - m) * (1 / LN2<A>));
    });
    *spread = all;
    *picked = column >= 0 && column < real ? wide(z[column]) : A(0);
}

template <typename T, typename A>
void gradient(const T* z, int64_t column, A lse, A dloss, T* dz, int64_t width, int64_t real, A hit, A spread) {
    const bool here = column >= 0 && column < real;
    const A picked = here ? wide(z[column]) : A(0);  // before dz, which may be z, is written
    for (int64_t i = 0; i < real; i += L<A>)
        store((power((load(z + i, real - i) - lse) * (1 / LN2<A>)) - spread) * dloss, dz + i, real - i);
    for (int64_t i = real; i < width; ++i) put(A(0), dz + i);
    if (here) put((std::exp(picked - lse) - spread - hit) * dloss, dz + column);
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
