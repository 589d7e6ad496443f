// Paged attention on a CPU: a few new tokens of each sequence attend to all of its tokens, read in place.
//
// Memory bandwidth is the limit, so a token reads its keys once and then its values once, a page at a time for all its
// heads. Where the heads of a page are contiguous, as in `inference/paged_cache`, the CPU prefetches within a page by
// itself, and the kernel prefetches the beginning of the next page.
//
//     s_j = q . k_j            the scores of all keys, four keys and two heads that share them at once
//     w_j = e^(s_j - max s)
//     o   = sum_j w_j v_j / sum_j w_j
//
// Sums are in fp32 (fp64 for fp64). Keys and values behind a sequence's last token are never read; a NaN score makes the
// output NaN. Threads split the sequences, and the head groups where there are few sequences.

#include "vector.h"

namespace {

constexpr int BLOCK = 16;  // keys, or values, that all heads read before the next ones: usually a page
constexpr int FIRST = 512;  // bytes of the next page to prefetch
constexpr int KEYS = 4;   // keys at once: with two heads 8 sums, which fill two FMA units of four cycles latency
constexpr int TILE = 4;   // vectors of a value at once

// out[r][0 .. tile vectors) += sum over `count` keys of weights[r][j] v[j].
template <int rows, int tile, typename T, typename A>
inline void add_values(const A* weights, int64_t weights_row, const T* v, int64_t value_row, int64_t count, A* out,
                       int64_t out_row) {
    using V = typename Vector<A>::type;
    constexpr int lanes = Vector<A>::lanes;
    V sums[rows][tile];
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < tile; ++t) sums[r][t] = load(out + r * out_row + t * lanes);
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
        for (int t = 0; t < tile; ++t) {
            const V x = load(v + j * value_row + t * lanes);
#pragma GCC unroll 2
            for (int r = 0; r < rows; ++r) sums[r][t] += weights[r * weights_row + j] * x;
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < tile; ++t) store(sums[r][t], out + r * out_row + t * lanes);
}

template <typename T, typename A>
struct Attention {
    const T *q, *keys, *values;
    T* out;
    const int32_t *starts, *lengths, *table;
    int64_t sequences, most, longest, page_size, heads, groups, d, dv;
    int64_t key_strides[3], value_strides[3];
    A scale;
    int64_t window;
    A softcap;
    const T* sinks;

    // Scores of `rows` heads for a block of keys.
    template <int rows>
    void score(const A* q, const T* k, int64_t count, A* scores, int64_t scores_row) const {
        const int64_t key_row = key_strides[1];
        int64_t j = 0;
        for (; j + KEYS <= count; j += KEYS)
            dots<rows, KEYS>(q, k + j * key_row, key_row, d, scores + j, scores_row);
        for (; j < count; ++j) dots<rows, 1>(q, k + j * key_row, key_row, d, scores + j, scores_row);
    }

    // Add a block of values, weighted, to the outputs of `rows` heads.
    template <int rows>
    void gather(const A* weights, int64_t weights_row, const T* v, int64_t count, A* sums) const {
        constexpr int lanes = Vector<A>::lanes;
        const int64_t value_row = value_strides[1];
        int64_t c = 0;
        for (; c + TILE * lanes <= dv; c += TILE * lanes)
            add_values<rows, TILE>(weights, weights_row, v + c, value_row, count, sums + c, dv);
        for (; c + lanes <= dv; c += lanes)
            add_values<rows, 1>(weights, weights_row, v + c, value_row, count, sums + c, dv);
        for (; c < dv; ++c)
            for (int r = 0; r < rows; ++r)
                for (int64_t j = 0; j < count; ++j)
                    sums[r * dv + c] += weights[r * weights_row + j] * wide(v[j * value_row + c]);
    }

    // Call `visit(from, rows, number of keys before them)` for blocks of the keys or values first .. last.
    template <typename Visit>
    void each_block(const T* base, const int64_t* strides, const int32_t* pages, int64_t first, int64_t last,
                    Visit visit) const {
        for (int64_t j = first; j <= last;) {
            const int64_t row = j % page_size, size = std::min({page_size - row, last + 1 - j, int64_t(BLOCK)});
            const int64_t next = j + size;
            if (next <= last && next % page_size == 0) {
                const char* line = reinterpret_cast<const char*>(base + pages[next / page_size] * strides[0]);
                for (int b = 0; b < FIRST; b += 64) __builtin_prefetch(line + b);
            }
            visit(base + pages[j / page_size] * strides[0] + row * strides[1], size, j - first);
            j = next;
        }
    }

    // Call `two(h)` for heads h and h + 1 that share their keys, `one(h)` for one that is left over.
    template <typename Two, typename One>
    void each_head(int64_t mine, Two two, One one) const {
        const int64_t shared = heads / groups;
        for (int64_t h = 0; h < mine;) {
            if (h % shared + 1 < shared) two(h), h += 2;
            else one(h), h += 1;
        }
    }

    // The heads of groups g0 .. g1 of one new token, in row `row`, which sees keys first .. last.
    void token(int64_t row, const int32_t* pages, int64_t first, int64_t last, int64_t g0, int64_t g1,
               std::vector<A>& room) const {
        const int64_t shared = heads / groups, mine = (g1 - g0) * shared, count = last + 1 - first;
        room.resize(std::max<size_t>(room.size(), mine * (d + count + dv)));
        A *queries = room.data(), *scores = queries + mine * d, *sums = scores + mine * count;
        const T* from = q + (row * heads + g0 * shared) * d;
        for (int64_t i = 0; i < mine * d; ++i) queries[i] = wide(from[i]) * scale;
        std::fill(sums, sums + mine * dv, A(0));

        each_block(keys + g0 * key_strides[2], key_strides, pages, first, last, [&](const T* from, int64_t size, int64_t at) {
            auto keys_of = [&](int64_t h) { return from + h / shared * key_strides[2]; };
            each_head(
                mine, [&](int64_t h) { score<2>(queries + h * d, keys_of(h), size, scores + h * count + at, count); },
                [&](int64_t h) { score<1>(queries + h * d, keys_of(h), size, scores + h * count + at, count); });
        });
        for (int64_t h = 0; h < mine; ++h)
            soften(scores + h * count, count, sinks ? wide(sinks[g0 * shared + h]) : -std::numeric_limits<A>::infinity());
        each_block(values + g0 * value_strides[2], value_strides, pages, first, last, [&](const T* from, int64_t size, int64_t at) {
            auto values_of = [&](int64_t h) { return from + h / shared * value_strides[2]; };
            each_head(
                mine, [&](int64_t h) { gather<2>(scores + h * count + at, count, values_of(h), size, sums + h * dv); },
                [&](int64_t h) { gather<1>(scores + h * count + at, count, values_of(h), size, sums + h * dv); });
        });
        T* to = out + (row * heads + g0 * shared) * dv;
        for (int64_t i = 0; i < mine * dv; ++i) put(sums[i], to + i);
    }

    // Softmax of the scores and of one more, `sink`, which is not among them; -inf for none.
    void soften(A* scores, int64_t count, A sink) const {
        if (softcap > 0)
            for (int64_t j = 0; j < count; ++j) scores[j] = softcap * std::tanh(scores[j] / softcap);
        A top = sink;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < count; ++j) top = scores[j] > top ? scores[j] : top;
        for (int64_t j = 0; j < count; j += L<A>)
            store(power((load(scores + j, count - j) - top) * (1 / LN2<A>)), scores + j, count - j);
        const A sum = sum_over<A>(count, [&](int64_t j, int64_t left) { return load(scores + j, left); });
        const A share = 1 / (sinks ? sum + std::exp(sink - top) : sum);
        for (int64_t j = 0; j < count; ++j) scores[j] *= share;
    }

    // The heads of groups g0 .. g1 of all new tokens of a sequence.
    void sequence(int64_t s, int64_t g0, int64_t g1, std::vector<A>& room) const {
        const int64_t queries = starts[s + 1] - starts[s];
        if (queries > longest) return;
        for (int64_t i = 0; i < queries; ++i) {
            const int64_t last = lengths[s] - queries + i;  // its own position: causal
            const int64_t first = window > 0 ? std::max<int64_t>(last + 1 - window, 0) : 0;
            token(starts[s] + i, table + s * most, first, last, g0, g1, room);
        }
    }

    void run(int64_t threads) const {
        double work = 0;
        for (int64_t s = 0; s < sequences; ++s)
            if (starts[s + 1] - starts[s] <= longest) work += double(starts[s + 1] - starts[s]) * lengths[s];
        work *= double(heads) * (d + dv);
        const int64_t some = std::max<int64_t>(std::min<int64_t>(threads, work / WORTH_A_THREAD), 1);
        const int64_t parts = std::min(groups, (some + sequences - 1) / std::max<int64_t>(sequences, 1));
        share<A>(sequences * parts, threads, work, [&](int64_t i, std::vector<A>& room) {
            const int64_t part = i % parts;
            sequence(i / parts, part * groups / parts, (part + 1) * groups / parts, room);
        });
    }
};

}  // namespace

// q [n, heads, d] and out [n, heads, dv] are dense; keys and values have strides of (page, row, head) in elements, and
// dense channels. Sequences with more than `longest` new tokens are left out. window 0 and softcap 0 for none; sinks [heads]
// or null.
MM_EXPORT mm_paged_attention(const void* q, const void* keys, const void* values, void* out, const void* starts,
                             const void* lengths, const void* table, int64_t key_page, int64_t key_row,
                             int64_t key_head, int64_t value_page, int64_t value_row, int64_t value_head,
                             int64_t sequences, int64_t most, int64_t longest, int64_t page_size, int64_t heads,
                             int64_t groups, int64_t d, int64_t dv, double scale, int64_t window, double softcap,
                             const void* sinks, int dtype, void* stream) {
#define MM_ATTEND(T, A)                                                                                             \
    Attention<T, A>{static_cast<const T*>(q), static_cast<const T*>(keys), static_cast<const T*>(values),           \
                    static_cast<T*>(out), static_cast<const int32_t*>(starts),                                      \
                    static_cast<const int32_t*>(lengths), static_cast<const int32_t*>(table), sequences, most,      \
                    longest, page_size, heads, groups, d, dv, {key_page, key_row, key_head},                        \
                    {value_page, value_row, value_head}, static_cast<A>(scale), window, static_cast<A>(softcap),    \
                    static_cast<const T*>(sinks)}                                                                   \
        .run(threads_of(stream))
    switch (dtype) {
        case 0: MM_ATTEND(float, float); return 0;
        case 1: MM_ATTEND(bf16, float); return 0;
        case 3: MM_ATTEND(double, double); return 0;
        default: return -1;
    }
}

// Write new tokens [n, heads, bytes] into pages [page, row, head, bytes]: token i into slot rows[i] = page * page size +
// row. Strides are in bytes.
MM_EXPORT mm_keep_tokens(const void* tokens, void* pages, const void* rows, int64_t n, int64_t page_size, int64_t heads,
                         int64_t bytes, int64_t token, int64_t token_head, int64_t page, int64_t row, int64_t head,
                         void* stream) {
    (void)stream;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t where = static_cast<const int64_t*>(rows)[i];
        char* to = static_cast<char*>(pages) + where / page_size * page + where % page_size * row;
        const char* from = static_cast<const char*>(tokens) + i * token;
        for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * head, from + h * token_head, bytes);
    }
    return 0;
}
