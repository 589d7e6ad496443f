// What a learner's kernel meets when it runs on a CPU: pointers that count, know their bounds, and refuse odd addresses.
//
// `lab/cuda.py` rewrites the learner's `const float* x` to `Counted<const float> x` before g++ sees it; nvcc gets the
// text as it was written. So the same CUDA C++ runs in both places, and here every access to global memory passes `touch`:
//
//   bytes                      what the kernel asked for, by array
//   times                      instructions of one thread: 16 bytes with one float4, 4 with one float
//   sectors                    pieces of 32 bytes that the memory delivers for one instruction of a warp. Lanes that ask
//                              for neighbours share them: 32 floats are 4 sectors, 32 floats a row apart are 32
//   out of bounds, misaligned  the launch fails with 700 or 716, as on a GPU, and says which thread, which array, where
//
// A thread that loads the same address twice in a row has it in a register: that counts once. Two accesses belong to
// one instruction of a warp if they come from the same place in the code for the same time: the return address of
// `touch` is that place, which is why it is never inlined.
#pragma once
#include "device.h"
#ifdef MM_EMULATE

struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
constexpr int warpSize = 32;
using std::max;
using std::min;

namespace lab {
constexpr int ARRAYS = 8, SECTOR = 32;
struct Array {
  const char* name;
  const char* begin;
  size_t size;
  long long times[2], bytes[2], sectors[2];          // loads, stores
};
struct Request { int n; uintptr_t sectors[32]; };
struct Site {                                        // a place in the code that loads, or one that stores
  void* at;
  bool store;
  std::vector<uint32_t> times;                       // by thread
  std::vector<std::vector<Request>> warps;           // by warp, then by time
};
struct Last { const void* address; size_t bytes; long long waits; };
struct Ledger {
  Array arrays[ARRAYS];
  Last last[1024];                                   // what each thread loaded last, and before which wait
  long long block = -1;
  std::vector<Site> sites;
  int error = 0;
};
inline Ledger L;

inline void next_block() {
  for (auto& site : L.sites) {
    for (auto& warp : site.warps) warp.clear();
    std::fill(site.times.begin(), site.times.end(), 0u);
  }
}
inline bool refuse(int error, const char* what, int id, long long index, const char* why) {
  if (!L.error) {
    L.error = error;
    auto b = emulator::S.block_id;
    std::snprintf(emulator::S.message, sizeof emulator::S.message, "thread %d of block %u %s %s[%lld]%s", emulator::S.current,
                  b.x, what, L.arrays[id].name, index, why);
  }
  return false;
}
// One access of one thread. False: it is not to be done.
__attribute__((noinline)) inline bool touch(const void* address, size_t bytes, int id, bool store) {
  if (id < 0) return true;                           // shared, or the thread's own
  void* place = __builtin_return_address(0);
  Array& array = L.arrays[id];
  const char* p = (const char*)address;
  const char* verb = store ? "writes" : "reads";
  if (p < array.begin || p + bytes > array.begin + array.size) {
    char why[64];
    std::snprintf(why, sizeof why, "; it has %zu numbers", array.size / 4);
    return refuse(700, verb, id, (p - array.begin) / 4, why);
  }
  if ((p - array.begin) % bytes) return refuse(716, verb, id, (p - array.begin) / 4, " as float4: no multiple of 16 bytes");
  const long long waits = emulator::S.counters[1] + emulator::S.counters[2];
  Last& last = L.last[emulator::S.current];
  if (!store && last.address == address && last.bytes == bytes && last.waits == waits && L.block == emulator::S.counters[0])
    return true;                                     // `x[i] * x[i]`: every compiler loads it once
  if (!store) last = {address, bytes, waits};
  if (L.block != emulator::S.counters[0]) next_block(), L.block = emulator::S.counters[0];
  array.bytes[store] += bytes, ++array.times[store];
  Site* site = nullptr;
  for (auto& s : L.sites)
    if (s.at == place && s.store == store) site = &s;
  if (!site) {
    L.sites.push_back({place, store, std::vector<uint32_t>(1024), std::vector<std::vector<Request>>(32)});
    site = &L.sites.back();
  }
  auto& warp = site->warps[emulator::S.current >> 5];
  const uint32_t time = site->times[emulator::S.current]++;
  if (warp.size() <= time) warp.resize(time + 1, Request{});
  Request& request = warp[time];
  const uintptr_t sector = (p - array.begin) / SECTOR;
  for (int i = 0; i < request.n; ++i)
    if (request.sectors[i] == sector) return true;
  if (request.n < 32) request.sectors[request.n++] = sector, ++array.sectors[store];
  return true;
}
inline void whole_warp(int width) {
  if (width == 32 || L.error) return;
  L.error = 9;
  std::snprintf(emulator::S.message, sizeof emulator::S.message, "a shuffle among %d lanes; here it is among all 32", width);
}
inline void begin() {
  L.error = 0, L.block = -1, L.sites.clear();
  std::memset(L.arrays, 0, sizeof L.arrays);
  std::memset(L.last, 0, sizeof L.last);
}
inline int end(int error) { return error ? error : L.error; }
}  // namespace lab

template <class T> class Counted;
template <class T> class Ref {                       // what p[i] is where it may be written
  T* p;
  int id;
 public:
  __attribute__((always_inline)) Ref(T* p, int id) : p(p), id(id) {}
  __attribute__((always_inline)) operator T() const {
    T v;
    std::memset((void*)&v, 0xff, sizeof v);
    return lab::touch(p, sizeof(T), id, false) ? *p : v;
  }
  __attribute__((always_inline)) Ref& operator=(T v) {
    if (lab::touch(p, sizeof(T), id, true)) *p = v;
    return *this;
  }
  __attribute__((always_inline)) Ref& operator=(const Ref& other) { return *this = (T)other; }
  __attribute__((always_inline)) Ref& operator+=(T v) { return *this = (T)*this + v; }
  __attribute__((always_inline)) Ref& operator-=(T v) { return *this = (T)*this - v; }
  __attribute__((always_inline)) Ref& operator*=(T v) { return *this = (T)*this * v; }
  __attribute__((always_inline)) Ref& operator/=(T v) { return *this = (T)*this / v; }
  Counted<T> operator&() const { return Counted<T>(p, id); }
};
template <class T> class Counted {                   // a pointer
  using V = typename std::remove_const<T>::type;
  template <class U> friend class Counted;
  T* p;
  int id;
 public:
  Counted(T* p = nullptr, int id = -1) : p(p), id(id) {}
  template <class U, class = typename std::enable_if<std::is_same<const U, T>::value>::type>
  Counted(const Counted<U>& other) : p(other.p), id(other.id) {}
  template <class U, class = typename std::enable_if<!std::is_same<const U, T>::value && !std::is_same<U, T>::value>::type, class = void>
  explicit Counted(const Counted<U>& other) : p((T*)other.p), id(other.id) {}
  template <class I> __attribute__((always_inline)) auto operator[](I i) const {
    if constexpr (std::is_const<T>::value) {
      V v;
      std::memset((void*)&v, 0xff, sizeof v);
      return lab::touch(p + i, sizeof(V), id, false) ? (V)p[i] : v;
    } else {
      return Ref<T>(p + i, id);
    }
  }
  __attribute__((always_inline)) auto operator*() const { return (*this)[0]; }
  template <class I> Counted operator+(I i) const { return Counted(p + i, id); }
  template <class I> Counted operator-(I i) const { return Counted(p - i, id); }
  template <class I> Counted& operator+=(I i) { p += i; return *this; }
  Counted& operator++() { ++p; return *this; }
  Counted operator++(int) { Counted old = *this; ++p; return old; }
};
// CUDA's fourth argument, the number of lanes that exchange.
template <class T> T __shfl_xor_sync(unsigned mask, T v, int by, int width) { return lab::whole_warp(width), __shfl_xor_sync(mask, v, by); }
template <class T> T __shfl_down_sync(unsigned mask, T v, int by, int width) { return lab::whole_warp(width), __shfl_down_sync(mask, v, by); }
template <class T> T __shfl_sync(unsigned mask, T v, int lane, int width) { return lab::whole_warp(width), __shfl_sync(mask, v, lane); }
template <class To, class From> To mm_cast(const From& from) { return (To)from; }
#endif
