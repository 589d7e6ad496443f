// RMSNorm and LayerNorm on a CPU, forward and backward, with the residual addition before them: the formulas of norm.cu.
//
// torch reads and writes the activations in a pass for each of x + r, x^2, the mean, the scaling and gamma. Here a row
// comes from memory once and stays in the first-level cache until its last use, so each pass over it is cheap.
#include "vector.h"

namespace {

template <typename T, typename A>
void forward_row(const T* x, const T* r, const T* gamma, const T* beta, T* h, T* y, A* mean, A* rstd, int64_t n, A eps) {
    if (r) {
        for (int64_t i = 0; i < n; i += L<A>) store(load(x + i, n - i) + load(r + i, n - i), h + i, n - i);
        x = h;
    }
    A m = 0;
    if (beta) *mean = m = sum_over<A>(n, [&](int64_t i, int64_t left) { return load(x + i, left); }) / n;
    const A square = sum_over<A>(n, [&](int64_t i, int64_t left) {
        const Vec<A> centred = load(x + i, left) - m;
        return centred * centred;
    });
    A s = 1 / std::sqrt(square / n + eps);
    if (beta && std::isinf(square)) s = std::numeric_limits<A>::quiet_NaN();  // and not 0: a run that diverges is seen
    if (rstd) *rstd = s;
    for (int64_t i = 0; i < n; i += L<A>) {
        const Vec<A> z = (load(x + i, n - i) - m) * s * load(gamma + i, n - i);
        store(beta ? z + load(beta + i, n - i) : z, y + i, n - i);
    }
}

// Adds the row's part of dgamma and dbeta to theirs.
template <typename T, typename A>
void backward_row(const T* dy, const T* ds, const T* h, const T* gamma, A m, A s, T* dh, A* dgamma, A* dbeta, int64_t n) {
    // at once: large h times dy would overflow
    const auto normed = [&](int64_t i, int64_t left) { return (load(h + i, left) - m) * s; };
    const auto given = [&](int64_t i, int64_t left) { return load(dy + i, left) * load(gamma + i, left); };
    for (int64_t i = 0; i < n; i += L<A>)
        store(load(dgamma + i, n - i) + load(dy + i, n - i) * normed(i, n - i), dgamma + i, n - i);
    const A projection = sum_over<A>(n, [&](int64_t i, int64_t left) { return given(i, left) * normed(i, left); }) / n;
    A average = 0;
    if (dbeta) {
        for (int64_t i = 0; i < n; i += L<A>) store(load(dbeta + i, n - i) + load(dy + i, n - i), dbeta + i, n - i);
        average = sum_over<A>(n, given) / n;
    }
    for (int64_t i = 0; i < n; i += L<A>) {
        const Vec<A> of = s * (given(i, n - i) - average - normed(i, n - i) * projection);
        store(ds ? of + load(ds + i, n - i) : of, dh + i, n - i);
    }
}

}  // namespace

// rstd may be null, in inference.
MM_EXPORT mm_norm_forward(const void* x, const void* r, const void* gamma, const void* beta, void* h, void* y, void* mean,
                          void* rstd, int64_t rows, int64_t cols, double eps, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        each_row(rows, threads_of(stream), double(rows) * cols * 8, [&](int64_t i) {
            const int64_t at = i * cols;
            forward_row<T, A>((const T*)x + at, r ? (const T*)r + at : nullptr, (const T*)gamma, (const T*)beta,
                              (T*)h + at, (T*)y + at, (A*)mean + i, rstd ? (A*)rstd + i : nullptr, cols, (A)eps);
        });
    });
}

// partial: Acc<T> [2, parts, cols]. Part p has rows [p rows / parts, (p + 1) rows / parts): the sums do not depend on threads.
MM_EXPORT mm_norm_backward(const void* dy, const void* ds, const void* h, const void* gamma, const void* mean,
                           const void* rstd, void* dh, void* partial, void* dgamma, void* dbeta, int64_t rows, int64_t cols,
                           int64_t parts, int dtype, void* stream) {
    return by_dtype(dtype, [&](auto* like) {
        using T = std::remove_pointer_t<decltype(like)>;
        using A = Acc<T>;
        A *of_gamma = (A*)partial, *of_beta = of_gamma + parts * cols;
        share<A>(parts, threads_of(stream), double(rows) * cols * 16, [&](int64_t p, std::vector<A>&) {
            A *pg = of_gamma + p * cols, *pb = mean ? of_beta + p * cols : nullptr;
            std::fill_n(pg, cols, A(0));
            if (pb) std::fill_n(pb, cols, A(0));
            for (int64_t i = p * rows / parts; i < (p + 1) * rows / parts; ++i) {
                const int64_t at = i * cols;
                backward_row<T, A>((const T*)dy + at, ds ? (const T*)ds + at : nullptr, (const T*)h + at, (const T*)gamma,
                                   mean ? ((const A*)mean)[i] : A(0), ((const A*)rstd)[i], (T*)dh + at, pg, pb, cols);
            }
        });
        for (int64_t c = 0; c < cols; ++c) {
            A g = 0, b = 0;
            for (int64_t p = 0; p < parts; ++p) g += of_gamma[p * cols + c];
            put(g, (T*)dgamma + c);
            if (!mean) continue;
            for (int64_t p = 0; p < parts; ++p) b += of_beta[p * cols + c];
            put(b, (T*)dbeta + c);
        }
    });
}
