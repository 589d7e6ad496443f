// What a learner's kernel meets when it runs on a CPU: arrays that count, know their bounds, and see races.
//
// `labkit/cuda_parse.py` writes the learner's text again: `const float* x` becomes `Counted<const float>`, `x[i]` comes
// with its line and a number of its place. nvcc gets the text as it was written. What an access passes through is `touch`:
//
//   bytes                      what the kernel asked for, by array
//   times                      instructions of one thread: 16 bytes with one float4, 4 with one float
//   sectors                    pieces of 32 bytes that the memory delivers for one instruction of a warp. Lanes that ask
//                              for neighbours share them: 32 floats are 4 sectors, 32 floats a row apart are 32
//   out of bounds, misaligned  the launch ends with 700 or 716, as on a GPU, and says which thread, which array, which line
//   races                      two threads at one word of shared memory, one of which writes, and no barrier between them
//
// A pointer is a number of an array and a place in it, never an address: so what a kernel does to its pointers cannot reach
// anything but its arrays. A thread that loads the same address twice in a row has it in a register: that counts once. Two
// accesses belong to one instruction of a warp if they come from the same place in the text for the same time.
#pragma once
#include "device.h"
#ifdef MM_EMULATE
#include <cfloat>
#include <climits>
#include <initializer_list>

struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
constexpr int warpSize = 32;

namespace lab {
using emulator::S;
constexpr int ARRAYS = 8, SHARED = 64, LOCALS = 8, SECTOR = 32;
struct Place { int line, site; };                    // of the text
struct Index { long long at; int line, site; };
struct Word {                                        // of shared memory: who used it last, and in which epochs
  struct Use { int thread = -1, line = 0; long long serial = -1, block = 0, warp = 0; bool atomic = false; };
  Use wrote, read[2];                                // the two readers are of two warps, or of one
};
enum Kind { ARRAY, OF_BLOCK, OF_THREAD };
struct Region {
  const char* name = "";
  char* begin = nullptr;
  size_t size = 0;
  unsigned element = 4, generation = 0;
  Kind kind = ARRAY;
  Word* words = nullptr;
  unsigned grain = 4;                                // bytes of a word
  bool constant = false;
};
struct Counts { long long times[2], bytes[2], sectors[2]; };   // loads, stores
struct Request { int n; uintptr_t sectors[32]; };
struct Site {                                        // a place that loads, or one that stores
  std::vector<uint32_t> times;                       // by thread
  std::vector<std::vector<Request>> warps;           // by warp, then by time
};
struct Last { int id; long long at; size_t bytes; long long waits; };
struct Ledger {
  Region regions[ARRAYS + SHARED + 1024 * LOCALS];
  Counts counts[ARRAYS];
  std::vector<unsigned char> writes[ARRAYS];         // of each word
  Last last[1024];                                   // what each thread loaded last, and before which wait
  long long block = -1, ticks = 0, limit = 0, shared_uses[1024];
  long long busiest = 0;                             // most loads of shared memory by one thread of one block
  int shared = 0, line = 0, note_line = 0, printed = 0;
  bool quiet = false;
  std::vector<Site> sites;                           // 2 * place + whether it stores
  char note[200];
};
inline Ledger L;

template <class... A> [[noreturn]] void stop(int error, int line, const char* format, A... a) {
  if (S.fibers.empty() || !S.running) std::abort();  // not in a kernel
  std::snprintf(S.message, sizeof S.message, format, a...);
  L.line = line;
  emulator::stop(error);
}
// No error by itself: it is told when the result is wrong.
template <class... A> void note(int line, const char* format, A... a) {
  if (L.note_line) return;
  L.note_line = line;
  std::snprintf(L.note, sizeof L.note, format, a...);
}
inline void turned(int line) {
  if (++L.ticks > L.limit) stop(702, line, "stuck: after %lld turns of its loops the kernel is still not done", L.limit);
}
constexpr void tick(int line) { if (!__builtin_is_constant_evaluated()) turned(line); }

inline void next_block() {
  for (auto& site : L.sites) {
    for (auto& warp : site.warps) warp.clear();
    std::fill(site.times.begin(), site.times.end(), 0u);
  }
  for (long long& n : L.shared_uses) L.busiest = std::max(L.busiest, n), n = 0;
  L.block = S.serial;
}
// ------------------------------------------------------------------------------------------------- one access
inline void count(int id, long long at, size_t bytes, bool store, int place) {
  const long long waits = S.counters[1] + S.counters[2];
  if (L.block != S.serial) next_block();
  Last& last = L.last[S.current];
  if (!store && last.id == id && last.at == at && last.bytes == bytes && last.waits == waits) return;  // in a register
  if (!store) last = {id, at, bytes, waits};
  Counts& counts = L.counts[id];
  counts.bytes[store] += bytes, ++counts.times[store];
  const size_t number = 2 * place + store;
  if (L.sites.size() <= number) L.sites.resize(number + 1);
  Site& site = L.sites[number];
  if (site.times.empty()) site.times.resize(1024), site.warps.resize(32);
  auto& warp = site.warps[S.current >> 5];
  const uint32_t time = site.times[S.current]++;
  if (warp.size() <= time) warp.resize(time + 1, Request{});
  Request& request = warp[time];
  const uintptr_t sector = at / SECTOR;
  for (int i = 0; i < request.n; ++i)
    if (request.sectors[i] == sector) return;
  if (request.n < 32) request.sectors[request.n++] = sector, ++counts.sectors[store];
}
inline bool before(const Word::Use& use) {           // whether a barrier stands between that use and now
  return use.serial != S.serial || use.thread == S.current || use.block < S.block_epoch ||
         (use.thread / 32 == S.current / 32 && use.warp < S.warp_epochs[S.current / 32]);
}
inline void race(const Region& r, long long number, const Word::Use& other, const char* did, const char* does, int line) {
  stop(719, line, "a race: thread %d of block %u %s %s[%lld], which thread %d %s at line %d, and no __syncthreads() is between",
       S.current, S.block_id.x, does, r.name, number, other.thread, did, other.line);
}
inline void watch(Region& r, long long at, size_t bytes, bool store, const void* value, bool atomic, int line) {
  const Word::Use now{S.current, line, S.serial, S.block_epoch, S.warp_epochs[S.current / 32], atomic};
  const bool same = store && !atomic && !std::memcmp(r.begin + at, value, bytes);
  if (!store) ++L.shared_uses[S.current];
  if (L.block != S.serial) next_block();
  for (size_t i = at / r.grain; i * r.grain < at + bytes; ++i) {
    Word& word = r.words[i];
    const long long number = i * r.grain / r.element;
    const bool both = atomic && word.wrote.atomic;
    if (word.wrote.serial != S.serial && (!store || atomic))
      note(line, "thread %d of block %u reads %s[%lld], which was never written", S.current, S.block_id.x, r.name, number);
    if (!both && !same && !before(word.wrote)) race(r, number, word.wrote, "writes", store ? "writes" : "reads", line);
    if (!store || atomic) {
      auto& first = word.read[0];
      if (first.thread != S.current || first.serial != S.serial) word.read[1] = first;
      first = now;
    }
    if (!store) continue;
    for (auto& use : word.read)
      if (!same && !(atomic && use.atomic) && !before(use)) race(r, number, use, "reads", "writes", line);
    word.wrote = now;
  }
}
// One access of one thread; returns where it is to be done.
__attribute__((noinline)) inline char* touch(int id, unsigned generation, long long at, size_t bytes, bool store, const void* value,
                                             bool atomic, int line, int site) {
  if (id < 0) stop(700, line, "thread %d of block %u uses a pointer that points to no array", S.current, S.block_id.x);
  Region& r = L.regions[id];
  const char* verb = store ? "writes" : "reads";
  if (r.generation != generation) stop(700, line, "thread %d %s an array of a function that has ended", S.current, verb);
  if (at < 0 || at > (long long)r.size - (long long)bytes)  // no sum here: it could overflow
    stop(700, line, "thread %d of block %u %s %s[%lld]; it has %zu numbers", S.current, S.block_id.x, verb, r.name,
         (at < 0 ? at - (int)r.element + 1 : at) / (int)r.element, r.size / r.element);
  if ((uintptr_t)(r.begin + at) % bytes)
    stop(716, line, "thread %d of block %u %s %s[%lld] as float%zu: no multiple of %zu bytes", S.current, S.block_id.x, verb, r.name,
         at / r.element, bytes / 4, bytes);
  if (r.kind == ARRAY) {
    if (!store || atomic) count(id, at, bytes, false, site);
    if ((!store || atomic) && !r.constant && !L.writes[id][at / 4])
      note(line, "thread %d of block %u reads %s[%lld] before the kernel has written it", S.current, S.block_id.x, r.name, at / 4);
    if (store) {
      count(id, at, bytes, true, site);
      for (size_t i = at / 4; i < (at + bytes) / 4; ++i) L.writes[id][i] += L.writes[id][i] < 255;
    }
  } else if (r.kind == OF_BLOCK) {
    watch(r, at, bytes, store, value, atomic, line);
  }
  return r.begin + at;
}

// ---------------------------------------------------------------------------------------------------- pointers
template <class T> class Counted;
template <class T> class Ref;
template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<Ref<T>> { typedef T type; };
template <class T> constexpr T value(const T& v) { return v; }
template <class T> T value(const Ref<T>& v) { return v; }
template <class I> constexpr bool integer = std::is_integral<typename Plain<I>::type>::value;
template <class I> constexpr typename std::enable_if<integer<I>, Index>::type index(const I& i, Place p) {
  return {(long long)value(i), p.line, p.site};
}
template <class I> typename std::enable_if<!integer<I>, Index>::type index(const I& i, Place p) = delete;  // cuda_text says why

#define LAB_ASSIGN(op) \
  template <class V> __attribute__((always_inline)) Ref& operator op##=(const V& v) { return *this = (T)((T)*this op value(v)); }
#define LAB_REF                                                                                                        \
  int id;                                                                                                              \
  unsigned generation;                                                                                                 \
  long long at;                                                                                                        \
  int line, site;                                                                                                      \
  __attribute__((always_inline)) operator T() const {                                                                  \
    return *(const T*)touch(id, generation, at, sizeof(T), false, nullptr, false, line, site);                         \
  }                                                                                                                    \
  __attribute__((always_inline)) Ref& operator=(const T& v) {                                                          \
    T kept = v;                                                                                                        \
    *(T*)touch(id, generation, at, sizeof(T), true, &kept, false, line, site) = kept;                                  \
    return *this;                                                                                                      \
  }                                                                                                                    \
  Ref(const Ref&) = default;                                                                                           \
  __attribute__((always_inline)) Ref& operator=(const Ref& other) { return *this = (T)other; }
template <class T> class Ref {                       // what p[i] is where it may be written
 public:
  LAB_REF
  Ref(int id, unsigned generation, long long at, int line, int site)
      : id(id), generation(generation), at(at), line(line), site(site) {}
  LAB_ASSIGN(+) LAB_ASSIGN(-) LAB_ASSIGN(*) LAB_ASSIGN(/) LAB_ASSIGN(%) LAB_ASSIGN(<<) LAB_ASSIGN(>>) LAB_ASSIGN(&)
  LAB_ASSIGN(|) LAB_ASSIGN(^)
  Ref& operator++() { return *this += 1; }
  Ref& operator--() { return *this -= 1; }
  T operator++(int) { T old = *this; *this = (T)(old + 1); return old; }
  T operator--(int) { T old = *this; *this = (T)(old - 1); return old; }
};
#define LAB_PART(name, n) name(id, generation, at + 4 * n, line, site)
#define LAB_VECTOR(T, E, members, ...)                                                                                  \
  template <> class Ref<T> {                                                                                            \
    typedef ::T vector;                                                                                                 \
   public:                                                                                                              \
    typedef ::T T_;                                                                                                     \
    int id;                                                                                                             \
    unsigned generation;                                                                                                \
    long long at;                                                                                                       \
    int line, site;                                                                                                     \
    Ref<E> members;                                                                                                     \
    Ref(int id, unsigned generation, long long at, int line, int site)                                                  \
        : id(id), generation(generation), at(at), line(line), site(site), __VA_ARGS__ {}                                \
    operator vector() const { return *(const vector*)touch(id, generation, at, sizeof(vector), false, nullptr, false, line, site); } \
    Ref& operator=(const vector& v) {                                                                                   \
      vector kept = v;                                                                                                  \
      *(vector*)touch(id, generation, at, sizeof(vector), true, &kept, false, line, site) = kept;                       \
      return *this;                                                                                                     \
    }                                                                                                                   \
    Ref(const Ref&) = default;                                                                                          \
    Ref& operator=(const Ref& other) { return *this = (vector)other; }                                                  \
  };
#define LAB_TWO x, y
#define LAB_FOUR x, y, z, w
LAB_VECTOR(float2, float, LAB_TWO, LAB_PART(x, 0), LAB_PART(y, 1))
LAB_VECTOR(int2, int, LAB_TWO, LAB_PART(x, 0), LAB_PART(y, 1))
LAB_VECTOR(float4, float, LAB_FOUR, LAB_PART(x, 0), LAB_PART(y, 1), LAB_PART(z, 2), LAB_PART(w, 3))
LAB_VECTOR(int4, int, LAB_FOUR, LAB_PART(x, 0), LAB_PART(y, 1), LAB_PART(z, 2), LAB_PART(w, 3))

template <class T> class Counted {                   // a pointer: a place in an array
  typedef typename std::remove_const<T>::type V;
  template <class U> friend class Counted;
  template <class To, class From> friend Counted<To> moved(const Counted<From>& from);
  int id = -1;
  unsigned generation = 0;
  long long at = 0;
 public:
  Counted() = default;
  explicit Counted(int id, unsigned generation = 0, long long at = 0) : id(id), generation(generation), at(at) {}
  template <class U, class = typename std::enable_if<std::is_same<const U, T>::value>::type>
  Counted(const Counted<U>& other) : id(other.id), generation(other.generation), at(other.at) {}
  __attribute__((always_inline)) auto operator[](Index i) const {
    const long long there = at + i.at * (long long)sizeof(V);
    if constexpr (std::is_const<T>::value)
      return *(const V*)touch(id, generation, there, sizeof(V), false, nullptr, false, i.line, i.site);
    else
      return Ref<V>(id, generation, there, i.line, i.site);
  }
  char* both(Place p, const V& v) const { return touch(id, generation, at, sizeof(V), true, &v, true, p.line, p.site); }
  Counted operator+(long long i) const { return Counted(id, generation, at + i * (long long)sizeof(V)); }
  Counted operator-(long long i) const { return *this + -i; }
  friend Counted operator+(long long i, const Counted& p) { return p + i; }
  template <class U> long long operator-(const Counted<U>& other) const { return (at - other.at) / (long long)sizeof(V); }
  Counted& operator+=(long long i) { return *this = *this + i; }
  Counted& operator-=(long long i) { return *this = *this - i; }
  Counted& operator++() { return *this += 1; }
  Counted& operator--() { return *this -= 1; }
  Counted operator++(int) { Counted old = *this; ++*this; return old; }
  Counted operator--(int) { Counted old = *this; --*this; return old; }
  template <class U> bool operator==(const Counted<U>& o) const { return id == o.id && at == o.at; }
  template <class U> bool operator!=(const Counted<U>& o) const { return !(*this == o); }
  template <class U> bool operator<(const Counted<U>& o) const { return at < o.at; }
  template <class U> bool operator>(const Counted<U>& o) const { return at > o.at; }
  template <class U> bool operator<=(const Counted<U>& o) const { return at <= o.at; }
  template <class U> bool operator>=(const Counted<U>& o) const { return at >= o.at; }
};
template <class To, class From> Counted<To> moved(const Counted<From>& from) {
  return Counted<To>(from.id, from.generation, from.at);
}

// ------------------------------------------------------------------------------------------------------ arrays
template <class T> constexpr bool can_be_shared = std::is_arithmetic<T>::value || std::is_same<T, float2>::value ||
    std::is_same<T, float4>::value || std::is_same<T, int2>::value || std::is_same<T, int4>::value;
template <class T, int N, int M = 0> class Shared {  // one array of a block; there is one block at a time
  static_assert(can_be_shared<T>, "shared memory is of numbers, or of float4");
  static_assert(N > 0 && M >= 0 && sizeof(T) * N * (M ? M : 1) <= 48 * 1024, "a block has 48 KiB of shared memory");
  static constexpr unsigned GRAIN = sizeof(T) < 4 ? sizeof(T) : 4;
  alignas(16) T values[N * (M ? M : 1)];
  Word words[sizeof(T) * N * (M ? M : 1) / GRAIN];
  int id;
 public:
  explicit Shared(const char* name) : id(ARRAYS + L.shared++) {
    if (L.shared > SHARED) stop(9, 0, "more than %d shared arrays", SHARED);
    std::memset((void*)values, 0xff, sizeof values);
    S.shared.emplace_back(values, sizeof values);
    Region& r = L.regions[id];
    r.name = name, r.begin = (char*)values, r.size = sizeof values, r.element = sizeof(T), r.kind = OF_BLOCK;
    r.words = words, r.grain = GRAIN;
  }
  Shared(const Shared&) = delete;
  Counted<T> pointer() const { return Counted<T>(id); }
  auto operator[](Index i) const {
    if constexpr (M == 0) {
      return pointer()[i];
    } else {
      if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses %s[%lld]; it has %d rows", S.current, L.regions[id].name, i.at, N);
      return pointer() + i.at * M;
    }
  }
};
struct Zero {};
template <class T, int N> class Local {              // an array of one thread
  static_assert(N > 0 && sizeof(T) * N <= 16 * 1024, "an array of a thread has at most 16 KiB");
  T values[N];
  mutable int id = -1;
  void check(Index i) const {
    if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses element %lld of an array of %d", S.current, i.at, N);
  }
 public:
  Local() {}
  Local(Zero) { for (T& v : values) v = T{}; }
  Local(std::initializer_list<T> list) {
    int n = 0;
    for (const T& v : list) if (n < N) values[n++] = v;
    for (; n < N; ++n) values[n] = T{};
  }
  Local(const Local& other) { for (int i = 0; i < N; ++i) values[i] = other.values[i]; }
  Local& operator=(const Local& other) { for (int i = 0; i < N; ++i) values[i] = other.values[i]; return *this; }
  ~Local() { if (id >= 0) ++L.regions[id].generation, L.regions[id].begin = nullptr; }
  T& operator[](Index i) & { return check(i), values[i.at]; }
  const T& operator[](Index i) const& { return check(i), values[i.at]; }
  T operator[](Index i) && { return check(i), values[i.at]; }
  Counted<T> pointer() const {                       // valid while this array lives: `generation`
    for (int k = 0; id < 0 && k < LOCALS; ++k)
      if (int free = ARRAYS + SHARED + S.current * LOCALS + k; !L.regions[free].begin) id = free;
    if (id < 0) stop(9, 0, "a thread points to more than %d arrays of its own", LOCALS);
    Region& r = L.regions[id];
    r.name = "an array", r.begin = (char*)values, r.size = sizeof values, r.element = sizeof(T), r.kind = OF_THREAD;
    return Counted<T>(id, r.generation);
  }
};
template <class T, int N> struct Table {             // of constants
  T values[N];
  constexpr T operator[](Index i) const {
    if (i.at < 0 || i.at >= N) stop(700, i.line, "thread %d uses element %lld of a table of %d", S.current, i.at, N);
    return values[i.at];
  }
};
template <class T, int N, int M> Counted<T> value(const Shared<T, N, M>& a) { return a.pointer(); }
template <class T, int N> Counted<T> value(const Local<T, N>& a) { return a.pointer(); }
template <class T, int N, int M, class I> auto operator+(const Shared<T, N, M>& a, const I& i) { return a.pointer() + value(i); }
template <class T, int N, class I> auto operator+(const Local<T, N>& a, const I& i) { return a.pointer() + value(i); }
template <class A> auto plus(const A& a, Index i) { return value(a) + i.at; }
template <class A> auto star(const A& a, Place p) { return value(a)[Index{0, p.line, p.site}]; }
template <class A> struct Target { typedef void type; };
template <class T> struct Target<Counted<T>> { typedef T type; };
template <class From> using Pointed = typename Target<decltype(value(std::declval<const From&>()))>::type;
template <class To, class From> constexpr bool keeps_const =
    !std::is_void<Pointed<From>>::value && (std::is_const<To>::value || !std::is_const<Pointed<From>>::value);
template <class To, class From> typename std::enable_if<keeps_const<To, From>, Counted<To>>::type cast(const From& from) {
  return moved<To>(value(from));
}
template <class To, class From> typename std::enable_if<!keeps_const<To, From>, Counted<To>>::type cast(const From& from) = delete;
// What is passed to a function of the learner's: variables by reference, arrays as pointers, words of memory as values.
template <class A> A&& argument(A&& a) { return static_cast<A&&>(a); }
template <class T> T argument(Ref<T>&& a) { return a; }
template <class T> T argument(Ref<T>& a) { return a; }
template <class T, int N, int M> Counted<T> argument(Shared<T, N, M>& a) { return a.pointer(); }
template <class T, int N> Counted<T> argument(Local<T, N>& a) { return a.pointer(); }
template <class T, int N> Counted<T> argument(const Local<T, N>& a) { return a.pointer(); }

// --------------------------------------------------------------------------------------- threads and their waits
inline void syncthreads(Place p) {
  S.lines[S.current] = p.line, S.sites[S.current] = p.site;
  emulator::wait(emulator::BLOCK);
}
// Before a barrier opens: all threads must be there, at the same one.
inline int met() {
  int first = -1, last = -1, gone = 0;
  for (int i = 0; i < S.threads; ++i) {
    if (S.fibers[i].done) { ++gone; continue; }
    if (first < 0) first = i;
    if (S.sites[i] != S.sites[first]) last = i;
  }
  L.line = S.lines[first];
  if (gone) std::snprintf(S.message, sizeof S.message, "thread %d of block %u waits at __syncthreads(), and %d threads have ended "
                          "without it: all threads of a block must meet it", first, S.block_id.x, gone);
  else if (last >= 0) std::snprintf(S.message, sizeof S.message, "thread %d of block %u waits at the __syncthreads() of line %d, thread "
                                    "%d at that of line %d: all threads must meet the same one", first, S.block_id.x,
                                    S.lines[first], last, S.lines[last]);
  return gone || last >= 0 ? 702 : 0;
}
inline void among(unsigned mask, Place p, const char* what) {
  S.lines[S.current] = p.line, S.masks[S.current] = mask;
  if (!(mask >> (S.current & 31) & 1))
    stop(719, p.line, "thread %d calls %s with the mask 0x%x, which does not name its own lane %d", S.current, what, mask, S.current & 31);
}
inline void syncwarp(Place p, unsigned mask = ~0u) { among(mask, p, "__syncwarp"), emulator::wait(emulator::WARP); }
template <class T> T exchange(T mine, int from, unsigned mask, Place p, const char* what) {
  static_assert(std::is_arithmetic<T>::value, "a shuffle is of numbers");
  const int me = S.current, there = (me & ~31) + from;
  uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof mine);
  among(mask, p, what);
  S.slots[me] = bits;
  emulator::wait(emulator::WARP);
  const bool named = mask >> from & 1, here = there < S.threads && !S.fibers[there].done;
  if (!named || !here)
    note(p.line, "thread %d takes a value from lane %d, which %s", me, from,
         !here ? "is not there: the warp has fewer threads, or it has ended" : "the mask does not name");
  bits = named && here ? S.slots[there] : ~0ull;
  S.masks[me] = mask;
  emulator::wait(emulator::WARP);
  std::memcpy(&mine, &bits, sizeof mine);
  return mine;
}
template <class T> using Of = typename Plain<T>::type;
inline int wide(int width, int line) {
  if (width < 1 || width > 32 || width & (width - 1)) stop(9, line, "a shuffle among %d lanes: 1, 2, 4, 8, 16 or 32", width);
  return width;
}
template <class T> Of<T> shfl_sync(Place p, unsigned mask, const T& v, int lane, int width = 32) {
  const int me = S.current & 31, first = me & ~(wide(width, p.line) - 1);
  return exchange<Of<T>>(v, first + (lane & (width - 1)), mask, p, "__shfl_sync");
}
template <class T> Of<T> shfl_xor_sync(Place p, unsigned mask, const T& v, int by, int width = 32) {
  const int me = S.current & 31, other = me ^ (by & 31), end = (me & ~(wide(width, p.line) - 1)) + width;
  return exchange<Of<T>>(v, other < end ? other : me, mask, p, "__shfl_xor_sync");
}
template <class T> Of<T> shfl_down_sync(Place p, unsigned mask, const T& v, unsigned by, int width = 32) {
  const int me = S.current & 31, end = (me & ~(wide(width, p.line) - 1)) + width;
  return exchange<Of<T>>(v, me + (long long)by < end ? me + by : me, mask, p, "__shfl_down_sync");
}
template <class T> Of<T> shfl_up_sync(Place p, unsigned mask, const T& v, unsigned by, int width = 32) {
  const int me = S.current & 31, first = me & ~(wide(width, p.line) - 1);
  return exchange<Of<T>>(v, me - (long long)by >= first ? me - by : me, mask, p, "__shfl_up_sync");
}
inline unsigned ballot_sync(Place p, unsigned mask, bool yes) {
  among(mask, p, "__ballot_sync");
  S.slots[S.current] = yes;
  emulator::wait(emulator::WARP);
  unsigned all = 0;
  for (int i = 0, first = S.current & ~31; i < 32; ++i)
    if (mask >> i & 1 && first + i < S.threads && !S.fibers[first + i].done) all |= (unsigned)(S.slots[first + i] == 1) << i;
  S.masks[S.current] = mask;
  emulator::wait(emulator::WARP);
  return all;
}
inline bool any_sync(Place p, unsigned mask, bool yes) { return ballot_sync(p, mask, yes) != 0; }
inline bool all_sync(Place p, unsigned mask, bool yes) { return ballot_sync(p, mask, !yes) == 0; }
template <class A> auto ldg(Place p, const A& a) { return value(star(a, p)); }
#define LAB_ATOMIC(name, expression)                                                                  \
  template <class A, class V> auto name(Place p, const A& a, const V& by) {                           \
    auto there = value(a);                                                                            \
    typedef decltype(value(there[Index{}])) T;                                                        \
    const T v = (T)value(by);                                                                         \
    T* word = (T*)there.both(p, v);                                                                   \
    const T old = *word;                                                                              \
    ++S.counters[3];                                                                                  \
    *word = expression;                                                                               \
    return old;                                                                                       \
  }
LAB_ATOMIC(atomicAdd, old + v)
LAB_ATOMIC(atomicMax, v > old ? v : old)
LAB_ATOMIC(atomicMin, v < old ? v : old)

// ------------------------------------------------------------------------------------------------------ functions
struct Value { bool real; double d; long long i; };
template <class T> Value printable(T v) {
  static_assert(std::is_arithmetic<T>::value, "printf here takes numbers");
  return {std::is_floating_point<T>::value, (double)v, (long long)v};
}
inline void written(const char* format, const Value* values, int n) {
  if (L.quiet || ++L.printed > 2000) return;
  int next = 0;
  for (const char* p = format; *p; ++p) {
    if (*p != '%') { std::putchar(*p); continue; }
    char one[24] = "%";
    int k = 1;
    for (++p; *p && std::strchr("-+ #0123456789.", *p) && k < 12; ++p) one[k++] = *p;
    while (*p && std::strchr("hlz", *p)) ++p;
    if (!*p) return;
    if (*p == '%') { std::putchar('%'); continue; }
    const bool real = std::strchr("fFeEgGaA", *p), whole = std::strchr("diuxXo", *p);
    if ((!real && !whole) || next >= n) { std::fputs("<?>", stdout); continue; }
    const Value v = values[next++];
    if (whole) one[k++] = 'l', one[k++] = 'l';
    one[k++] = *p, one[k] = 0;
    if (real) std::printf(one, v.real ? v.d : (double)v.i);
    else std::printf(one, v.real ? (long long)v.d : v.i);
  }
  std::fflush(stdout);
}
template <class... A> int print(const char* format, const A&... a) {
  const Value values[] = {printable(a)..., Value{}};
  return written(format, values, sizeof...(A)), 0;
}
namespace math {
#define LAB_ONE(n) inline float n##f(float x) { return std::n(x); } inline float n(float x) { return std::n(x); } \
  inline double n(double x) { return std::n(x); } inline double n(int x) { return std::n((double)x); }
#define LAB_BOTH(n) inline float n##f(float x, float y) { return std::n(x, y); } inline float n(float x, float y) { return std::n(x, y); } \
  inline double n(double x, double y) { return std::n(x, y); }
LAB_ONE(sqrt) LAB_ONE(exp) LAB_ONE(exp2) LAB_ONE(log) LAB_ONE(log2) LAB_ONE(log10) LAB_ONE(log1p) LAB_ONE(expm1) LAB_ONE(sin)
LAB_ONE(cos) LAB_ONE(tan) LAB_ONE(tanh) LAB_ONE(fabs) LAB_ONE(floor) LAB_ONE(ceil) LAB_ONE(round) LAB_ONE(rint) LAB_ONE(trunc)
LAB_ONE(erf) LAB_ONE(cbrt) LAB_BOTH(pow) LAB_BOTH(fmod) LAB_BOTH(copysign) LAB_BOTH(hypot) LAB_BOTH(fmax) LAB_BOTH(fmin)
inline float pow(float x, int n) { return std::pow(x, (float)n); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline double fma(double a, double b, double c) { return std::fma(a, b, c); }
inline float ldexpf(float x, int e) { return std::ldexp(x, e); }
#define LAB_LEAST(T) inline T min(T a, T b) { return b < a ? b : a; } inline T max(T a, T b) { return a < b ? b : a; }
LAB_LEAST(int) LAB_LEAST(unsigned) LAB_LEAST(long) LAB_LEAST(unsigned long) LAB_LEAST(long long) LAB_LEAST(unsigned long long)
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return std::fabs(x); }
inline double abs(double x) { return std::fabs(x); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::isinf(x); }
inline bool isfinite(float x) { return std::isfinite(x); }
inline float fsqrt_rn(float x) { return std::sqrt(x); }
inline float frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float frcp_rn(float x) { return 1.0f / x; }
inline float fdividef(float a, float b) { return a / b; }
inline float fdiv_rn(float a, float b) { return a / b; }
inline float fadd_rn(float a, float b) { return a + b; }
inline float fsub_rn(float a, float b) { return a - b; }
inline float fmul_rn(float a, float b) { return a * b; }
inline float fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float saturatef(float x) { return x > 0 ? x < 1 ? x : 1.0f : 0.0f; }
inline int float_as_int(float x) { return (int)emulator::bits(x); }
inline float int_as_float(int x) { return emulator::number((uint32_t)x); }
inline int float2int_rn(float x) { return x != x ? 0 : (int)std::nearbyint(std::fmax(std::fmin(x, 2147483520.f), -2147483648.f)); }
inline float int2float_rn(int x) { return (float)x; }
inline int popc(unsigned x) { return __builtin_popcount(x); }
inline int ffs(int x) { return __builtin_ffs(x); }
inline int clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
}  // namespace math

// -------------------------------------------------------------------------------------------------------- a launch
inline void begin() {
  L.block = -1, L.ticks = 0, L.line = L.note_line = L.printed = 0, L.note[0] = 0, L.busiest = 0;
  L.sites.clear();
  std::memset(L.counts, 0, sizeof L.counts), std::memset(L.shared_uses, 0, sizeof L.shared_uses);
  for (auto& last : L.last) last.id = -1;
  for (int i = ARRAYS + SHARED; i < ARRAYS + SHARED + 1024 * LOCALS; ++i)
    if (L.regions[i].begin) ++L.regions[i].generation, L.regions[i].begin = nullptr;
  for (auto& writes : L.writes) writes.clear();
  S.met = met;
}
inline void array(int i, const char* name, void* begin, int64_t numbers, bool constant) {
  Region& r = L.regions[i];
  r.constant = constant, r.name = name, r.begin = (char*)begin, r.size = 4 * numbers, r.element = 4, r.kind = ARRAY;
  L.writes[i].assign(numbers, 0);
}
inline int end(int error) { return next_block(), error; }
}  // namespace lab

// What Python may ask and say.
extern "C" {
inline __attribute__((used)) void lab_limit(long long turns, int quiet) { lab::L.limit = turns, lab::L.quiet = quiet; }
inline __attribute__((used)) const char* lab_note() { return lab::L.note; }
inline __attribute__((used)) void lab_numbers(long long* to) {   // lines, the busiest thread, then arrays: loads, stores
  *to++ = lab::L.line, *to++ = lab::L.note_line, *to++ = lab::L.busiest;
  for (auto& c : lab::L.counts)
    for (int store = 0; store < 2; ++store) *to++ = c.times[store], *to++ = c.bytes[store], *to++ = c.sectors[store];
}
inline __attribute__((used)) void lab_writes(int array, unsigned char* to) {
  std::memcpy(to, lab::L.writes[array].data(), lab::L.writes[array].size());
}
}
#endif
