// What kernels for CPUs stand on: vectors as wide as this CPU has, e^x, and threads that share pieces of work.
//
// Plain C++ for g++ and clang, compiled on the machine it runs on (`build.py`), so any CPU has the code for its own
// instructions.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#define MM_EXPORT extern "C" __attribute__((visibility("default"))) int

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;  // bytes of a vector
#elif defined(__AVX__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr double WORTH_A_THREAD = 1 << 21;  // products: about 0.1 ms, several times what it costs to start one

struct bf16 {
    uint16_t bits;
};

template <typename A, int bytes = WIDTH>
struct Vector {
    typedef A type __attribute__((vector_size(bytes)));
    static constexpr int lanes = bytes / sizeof(A);
};

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename A>
inline typename Vector<A>::type load(const A* from) {
    typename Vector<A>::type x;
    std::memcpy(&x, from, WIDTH);
    return x;
}
inline Vector<float>::type load(const bf16* from) {
    float x[Vector<float>::lanes];
    for (int i = 0; i < Vector<float>::lanes; ++i) x[i] = wide(from[i]);
    return load(x);
}

template <typename A>
inline void store(typename Vector<A>::type x, A* to) {
    std::memcpy(to, &x, WIDTH);
}

inline void put(float x, float* to) { *to = x; }
inline void put(double x, double* to) { *to = x; }
inline void put(float x, bf16* to) {  // to nearest even; not a number stays none
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename A, int bytes = WIDTH>
using Lanes = std::make_integer_sequence<int, Vector<A, bytes>::lanes>;

// The two halves of a vector, added.
template <typename A, int bytes, int... I>
inline auto halved(typename Vector<A, bytes>::type x, std::integer_sequence<int, I...>) {
    using Half = typename Vector<A, bytes / 2>::type;
    return Half{x[I]...} + Half{x[I + sizeof...(I)]...};
}

// The sum of a vector: of its halves, until they are 16 bytes.
template <typename A, int bytes = WIDTH>
inline A total(typename Vector<A, bytes>::type x) {
    if constexpr (bytes > 16) return total<A, bytes / 2>(halved<A, bytes>(x, Lanes<A, bytes / 2>{}));
    else if constexpr (sizeof(A) == 8) return x[0] + x[1];
    else return (x[0] + x[2]) + (x[1] + x[3]);
}

// Of each 16 bytes of a and b in turn: a0 + a2, b0 + b2, a1 + a3, b1 + b3; and a0 + a1, ... of what that gives.
template <int... I>
inline Vector<float>::type woven(Vector<float>::type a, Vector<float>::type b, std::integer_sequence<int, I...>) {
    using V = Vector<float>::type;
    return V{(I % 2 ? b : a)[I / 4 * 4 + I % 4 / 2]...} + V{(I % 2 ? b : a)[I / 4 * 4 + 2 + I % 4 / 2]...};
}
template <int... I>
inline Vector<float>::type joined(Vector<float>::type a, Vector<float>::type b, std::integer_sequence<int, I...>) {
    using V = Vector<float>::type;
    return V{(I % 4 / 2 ? b : a)[I / 4 * 4 + I % 2]...} + V{(I % 4 / 2 ? b : a)[I / 4 * 4 + 2 + I % 2]...};
}

template <int bytes>
inline void store_four(typename Vector<float, bytes>::type x, float* out) {
    if constexpr (bytes > 16) store_four<bytes / 2>(halved<float, bytes>(x, Lanes<float, bytes / 2>{}), out);
    else std::memcpy(out, &x, 16);
}

// The sums of four vectors, for less than twice what one costs.
inline void four_totals(const Vector<float>::type* x, float* out) {
    const Lanes<float> all{};
    store_four<WIDTH>(joined(woven(x[0], x[1], all), woven(x[2], x[3], all), all), out);
}

// e^x for x <= 0, in a form that a compiler makes vectors of: 2^n times a polynomial of degree 7 on [-1/2, 1/2] ln 2.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 0.0083333333f + r * (0.0013888889f + r * 0.0001984127f);
    p = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * (0.041666667f + r * p))));
    int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}
inline double exponential(double x) { return std::exp(x); }

// scores[r][j] = q[r] . k[j] of `rows` dense vectors q and `keys` vectors k. Additions take four cycles and two begin in
// each, so it wants eight sums or more.
template <int rows, int keys, typename T, typename A>
inline void dots(const A* q, const T* k, int64_t key_row, int64_t d, A* scores, int64_t scores_row) {
    using V = typename Vector<A>::type;
    constexpr int lanes = Vector<A>::lanes;
    V sums[rows][keys] = {};
    int64_t c = 0;
    for (; c + lanes <= d; c += lanes) {
        V x[keys];
#pragma GCC unroll 4
        for (int j = 0; j < keys; ++j) x[j] = load(k + j * key_row + c);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const V y = load(q + r * d + c);
#pragma GCC unroll 4
            for (int j = 0; j < keys; ++j) sums[r][j] += y * x[j];
        }
    }
    for (int r = 0; r < rows; ++r) {
        if constexpr (keys == 4 && sizeof(A) == 4) four_totals(sums[r], scores + r * scores_row);
        else for (int j = 0; j < keys; ++j) scores[r * scores_row + j] = total<A>(sums[r][j]);
        for (int64_t e = c; e < d; ++e)
            for (int j = 0; j < keys; ++j) scores[r * scores_row + j] += q[r * d + e] * wide(k[j * key_row + e]);
    }
}

// Call `piece(i, room)` for pieces 0 .. pieces - 1, by as many threads as `products` of them are worth.
template <typename A, typename Piece>
void share(int64_t pieces, int64_t threads, double products, Piece piece) {
    threads = std::max<int64_t>(std::min<int64_t>(threads, products / WORTH_A_THREAD), 1);
    std::atomic<int64_t> next{0};
    auto take = [&] {
        std::vector<A> room;
        for (int64_t i; (i = next++) < pieces;) piece(i, room);
    };
    std::vector<std::thread> others;
    try {
        while (static_cast<int64_t>(others.size()) + 1 < threads) others.emplace_back(take);
    } catch (const std::system_error&) {  // no more threads: those that are there do it
    }
    take();
    for (std::thread& other : others) other.join();
}

// Calls row(i) for each of `rows` rows, whose work together is `work` products.
template <typename Row>
void each_row(int64_t rows, int64_t threads, double work, Row row) {
    constexpr int64_t PIECE = 16;  // rows that a thread takes at a time
    share<float>((rows + PIECE - 1) / PIECE, threads, work, [&](int64_t piece, std::vector<float>&) {
        for (int64_t i = piece * PIECE; i < std::min(rows, (piece + 1) * PIECE); ++i) row(i);
    });
}

// The sum of of(i) over i < n. Thirty-two sums side by side, whatever the CPU's vectors: the order never depends on it.
template <typename A, typename Of>
inline A sum_over(int64_t n, Of of) {
    constexpr int64_t SIDE = 32;
    A side[SIDE] = {};
    int64_t i = 0;
    for (; i + SIDE <= n; i += SIDE)
#pragma GCC unroll 32
        for (int64_t j = 0; j < SIDE; ++j) side[j] += of(i + j);
    for (int64_t j = 0; i + j < n; ++j) side[j] += of(i + j);
    for (int64_t half = SIDE / 2; half; half /= 2)
        for (int64_t j = 0; j < half; ++j) side[j] += side[j + half];
    return side[0];
}

// RoPE of one head: turns the first 2 r channels by their angles, sign -1 backward, and copies the others.
template <typename T, typename A>
void turn(const T* x, const A* cos, const A* sin, A sign, T* y, int64_t r, int64_t d, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < r; ++i) {
            const A a = wide(x[2 * i]), b = wide(x[2 * i + 1]), s = sign * sin[i];
            put(a * cos[i] - b * s, y + 2 * i);
            put(b * cos[i] + a * s, y + 2 * i + 1);
        }
    } else {
        for (int64_t i = 0; i < r; ++i) {
            const A a = wide(x[i]), b = wide(x[r + i]), s = sign * sin[i];
            put(a * cos[i] - b * s, y + i);
            put(b * cos[i] + a * s, y + r + i);
        }
    }
    if (d > 2 * r) std::memcpy(y + 2 * r, x + 2 * r, (d - 2 * r) * sizeof(T));
}

}  // namespace

// The launchers of kernels that have a CUDA twin (`norm.cu` ...) have its signature: `dtype` is a place in
// `operators.DTYPES`, and `stream` the number of threads, since a CPU has no streams.
template <typename T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <typename T> using Acc = typename AccOf<T>::type;

inline int64_t threads_of(void* stream) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(stream)); }

template <typename Launch>
int by_dtype(int code, Launch launch) {  // launch(a pointer of the type): C++17 has no template arguments for lambdas
    switch (code) {
        case 0: return launch(static_cast<float*>(nullptr)), 0;
        case 1: return launch(static_cast<bf16*>(nullptr)), 0;
        case 3: return launch(static_cast<double*>(nullptr)), 0;
    }
    return -1;
}
