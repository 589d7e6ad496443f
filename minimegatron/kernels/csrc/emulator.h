// CUDA C++ on a CPU: enough of CUDA to run, break and debug the kernels of this folder without a GPU.
//
// A thread of a block is a fiber (ucontext): it runs alone until it waits, then the next one runs. Blocks run one after
// another. That models what decides whether a kernel is right, and nothing of what makes it fast:
//
//   __syncthreads, __syncwarp      a fiber waits until all live threads of the block (warp) wait at the same kind
//   __shfl*_sync, ballot, any, all an exchange through one slot a thread, between two waits of the warp
//   atomics                        plain read-modify-write: fibers are not interrupted
//   shared memory                  poisoned with 0xff (NaN) before every block, so reading what nobody wrote shows
//   missing barriers               a warp runs as far ahead of the others as barriers let it; `mm_emulator_order` chooses
//                                  who goes first (0 forward, 1 backward, n > 1 a shuffle by seed): races give other results
//   masks of a warp's waits        lanes that wait with one mask go on when all its live lanes wait with it
//   deadlock                       some wait at one barrier, some at another: the launch returns 702 with a message
//   stack overflow of a thread     a canary below each stack: 719
//
// One kernel runs at a time (a mutex). Compile with: g++ -x c++ -std=c++17 -DMM_EMULATE file.cu
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define MM_SHARED(T, name, n)                                                 \
  alignas(16) static typename std::remove_const<T>::type name[n];             \
  static emulator::Poisoned name##_poisoned(name, sizeof name)
#define MM_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emulator::dynamic_shared)
#define MM_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ((void)(stream), emulator::launch(dim3(grid), dim3(block), smem, [=] { (kernel)(__VA_ARGS__); }))
#define MM_RESIDENT(blocks, kernel, threads) ((void)(kernel), (blocks) = 2, 0)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef void* cudaStream_t;

namespace emulator {
enum Wait { RUN, BLOCK, WARP };
constexpr size_t STACK = 64 * 1024, SLACK = 256 * 1024;  // what a thread may use; what is mapped below it
constexpr uint64_t CANARY = 0x5afe5afe5afe5afeull;

struct Fiber {  // started once, by makecontext; from then on setjmp and longjmp, which make no system call
  ucontext_t context;
  jmp_buf here;
  char* stack = nullptr;
  bool started = false;
  bool done = true;
  Wait wait = RUN;
};
struct State {
  dim3 grid, block, block_id;
  int current = 0, threads = 0, order = 0;
  size_t dynamic_bytes = 0;
  std::vector<Fiber> fibers;
  std::vector<uint64_t> slots;                      // what a thread shows to its warp
  std::vector<std::pair<void*, size_t>> shared;     // static shared arrays seen so far
  std::vector<int> warps, lanes;                    // in which order they run
  jmp_buf scheduler;
  std::function<void()> body;
  std::mutex one_kernel;
  char message[256] = "";
  long long counters[4] = {0, 0, 0, 0};             // blocks, block barriers, warp waits, atomics; all threads together
  bool running = false;
  int error = 0;                                    // of `stop`
  int (*met)() = nullptr;                           // asked before a barrier of the block opens; an error ends the launch
  int (*hung)() = nullptr;                          // asked when no thread can go on: may say which waits for which
  long long serial = 0;                             // blocks since the library was loaded
  long long block_epoch = 0, warp_epochs[32] = {};  // barriers that have opened in this block
  unsigned masks[1024];                             // of the wait of each lane
  int lines[1024] = {}, sites[1024] = {};           // where each thread waits, if its text says so
};
inline State S;
alignas(128) inline char dynamic_shared[227 * 1024];  // what a block of an H100 can have

struct Poisoned {  // a static shared array: poisoned now, when the first thread meets it, and before every block
  Poisoned(void* memory, size_t bytes) { std::memset(memory, 0xff, bytes), S.shared.emplace_back(memory, bytes); }
};

inline void leave(Fiber& f) {                       // back to the scheduler, until it is this fiber's turn again
  if (!_setjmp(f.here)) _longjmp(S.scheduler, 1);
}
[[noreturn]] inline void stop(int error) {          // a thread ends the launch
  S.error = error;
  _longjmp(S.scheduler, 1);
}
inline void wait(Wait why) {
  Fiber& f = S.fibers[S.current];
  f.wait = why;
  ++S.counters[why];
  leave(f);
}
inline void entry() {
  for (;;) {                                        // one turn a block
    S.body();
    S.fibers[S.current].done = true;
    S.slots[S.current] = ~0ull;                     // a lane that has left shows NaN
    leave(S.fibers[S.current]);
  }
}
inline void resume(Fiber& f) {
  if (_setjmp(S.scheduler)) return;
  if (f.started) _longjmp(f.here, 1);
  f.started = true;
  if (!f.stack) {
    char* memory = (char*)mmap(nullptr, SLACK + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory, 64 * 1024, PROT_NONE);         // who goes deeper ends the process, and reaches nothing
    f.stack = memory + SLACK;
  }
  std::memcpy(f.stack, &CANARY, sizeof CANARY);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
  makecontext(&f.context, (void (*)())entry, 0);
  setcontext(&f.context);
}
inline int fail(int error) {                        // threads that hang in the middle are forgotten
  for (auto& f : S.fibers) f.started = false, f.done = true;
  return error;
}
inline bool live(int i) { return i < S.threads && !S.fibers[i].done; }
// Let lanes go on that wait for each other: all live ones that a mask names wait, with this mask.
inline bool open_warp(int first) {
  bool opened = false;
  for (int i = first; i < first + 32 && i < S.threads; ++i) {
    if (!live(i) || S.fibers[i].wait != WARP) continue;
    const unsigned mask = S.masks[i] | 1u << (i - first);
    auto waits = [&](int j) { return live(j) && S.fibers[j].wait == WARP && (S.masks[j] | 1u << (j - first)) == mask; };
    bool all = true;
    for (int lane = 0; lane < 32 && all; ++lane) all = !(mask >> lane & 1) || !live(first + lane) || waits(first + lane);
    if (!all) continue;
    for (int j = i; j < first + 32; ++j)
      if (waits(j)) S.fibers[j].wait = RUN;
    opened = true;
  }
  S.warp_epochs[first / 32] += opened;
  return opened;
}
// Run a warp until each of its live lanes waits for other warps. Returns 0, or an error.
inline int run_warp(int first, bool& ran) {
  do {
    for (int lane : S.lanes) {
      int i = first + lane;
      if (i >= S.threads || S.fibers[i].done || S.fibers[i].wait != RUN) continue;
      ran = true, S.current = i;
      resume(S.fibers[i]);
      if (std::memcmp(S.fibers[i].stack, &CANARY, sizeof CANARY)) {
        std::snprintf(S.message, sizeof S.message, "thread %d needs more than %zu bytes of stack", i, STACK);
        return fail(719);
      }
      if (S.error) return fail(S.error);
    }
  } while (open_warp(first));
  return 0;
}
inline int run_block() {
  std::memset(dynamic_shared, 0xff, S.dynamic_bytes);
  for (auto& s : S.shared) std::memset(s.first, 0xff, s.second);
  for (int i = 0; i < S.threads; ++i) S.fibers[i].done = false, S.fibers[i].wait = RUN;
  ++S.counters[0], ++S.serial;
  S.block_epoch = 0, std::memset(S.warp_epochs, 0, sizeof S.warp_epochs);
  for (;;) {
    bool ran = false;
    for (int warp : S.warps)
      if (int error = run_warp(32 * warp, ran)) return error;
    int alive = 0, at_block = 0;
    for (int i = 0; i < S.threads; ++i) alive += !S.fibers[i].done, at_block += !S.fibers[i].done && S.fibers[i].wait == BLOCK;
    if (!alive) return 0;
    if (alive == at_block) {
      if (int error = S.met ? S.met() : 0) return fail(error);
      ++S.block_epoch;
      for (int i = 0; i < S.threads; ++i) S.fibers[i].wait = RUN;
    } else if (!ran) {
      if (int error = S.hung ? S.hung() : 0) return fail(error);
      std::snprintf(S.message, sizeof S.message,
                    "deadlock in block (%u, %u, %u): %d threads wait at __syncthreads, %d for lanes of their warp",
                    S.block_id.x, S.block_id.y, S.block_id.z, at_block, alive - at_block);
      return fail(702);
    }
  }
}
inline std::vector<int> turns(int n) {
  std::vector<int> t(n);
  for (int i = 0; i < n; ++i) t[i] = S.order == 1 ? n - 1 - i : i;
  if (S.order > 1) std::shuffle(t.begin(), t.end(), std::mt19937(S.order));
  return t;
}
template <class F>
int launch(dim3 grid, dim3 block, size_t smem, F&& body) {
  std::lock_guard<std::mutex> alone(S.one_kernel);
  long long threads = (long long)block.x * block.y * block.z, blocks = (long long)grid.x * grid.y * grid.z;
  if (threads < 1 || threads > 1024 || blocks < 1 || smem > sizeof dynamic_shared || grid.y > 65535 || grid.z > 65535) {
    std::snprintf(S.message, sizeof S.message, "%lld blocks of %lld threads with %zu bytes of shared memory", blocks, threads, smem);
    return 9;                                       // cudaErrorInvalidConfiguration
  }
  struct Running { Running() { S.running = true; } ~Running() { S.running = false; } } while_running;
  S.error = 0, std::memset(S.masks, 0xff, sizeof S.masks);
  S.grid = grid, S.block = block, S.threads = (int)threads, S.dynamic_bytes = smem, S.body = body;
  if ((long long)S.fibers.size() < threads) S.fibers.resize(1024);
  S.slots.assign(1024, ~0ull);
  S.warps = turns((S.threads + 31) / 32), S.lanes = turns(32);
  for (long long i = 0; i < blocks; ++i) {
    long long b = S.order ? blocks - 1 - i : i;
    S.block_id = dim3(b % grid.x, b / grid.x % grid.y, b / ((long long)grid.x * grid.y));
    if (int error = run_block()) return error;
  }
  return 0;
}
inline dim3 thread_id() {
  unsigned t = S.current, x = S.block.x, y = S.block.y;
  return dim3(t % x, t / x % y, t / (x * y));
}
template <class T>
T exchange(T mine, int lane) {                      // what `lane` of this warp shows
  static_assert(sizeof(T) <= 8, "a slot has eight bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof mine);
  S.slots[S.current] = bits;
  wait(WARP);
  bits = S.slots[(S.current & ~31) + (lane & 31)];
  wait(WARP);
  std::memcpy(&mine, &bits, sizeof mine);
  return mine;
}
inline int lane() { return S.current & 31; }

// 16-bit floats: round to nearest even, in integers.
inline uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float number(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
inline uint16_t to_bf16(float x) {
  uint32_t u = bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40;
  return (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}
inline uint16_t to_fp16(float x) {
  uint16_t sign = bits(x) >> 16 & 0x8000;
  float a = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (a >= 65520.f) return sign | 0x7c00;
  if (a < 6.103515625e-5f) return sign | (uint16_t)std::nearbyint(a * 16777216.f);  // subnormal, steps of 2^-24
  uint32_t u = bits(a);
  return sign | (uint16_t)((u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13);
}
inline float from_fp16(uint16_t h) {
  int e = h >> 10 & 31, m = h & 1023;
  float a = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return h & 0x8000 ? -a : a;
}
// FP8, saturating as the hardware's conversion does: E4M3 (bias 7, top 448, no infinity) or E5M2 (bias 15, top 57344).
inline uint8_t to_fp8(float x, bool e5m2) {
  int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  float top = e5m2 ? 57344.f : 448.f, a = std::fabs(x);
  uint8_t sign = bits(x) >> 24 & 0x80;
  if (std::isnan(x)) return 0x7f;
  if (a >= top) return sign | (e5m2 ? 0x7b : 0x7e);
  int exponent = a > 0 ? std::max(std::ilogb(a), 1 - bias) : 1 - bias;
  int steps = (int)std::nearbyint(std::ldexp(a, mantissa - exponent));              // in units of the last place
  return sign | (uint8_t)(((exponent + bias - 1) << mantissa) + steps);             // a carry moves the exponent
}
}  // namespace emulator

struct __nv_bfloat16 { uint16_t x; };
struct __half { uint16_t x; };
inline float __bfloat162float(__nv_bfloat16 v) { return emulator::number((uint32_t)v.x << 16); }
inline __nv_bfloat16 __float2bfloat16(float v) { return {emulator::to_bf16(v)}; }
inline float __half2float(__half v) { return emulator::from_fp16(v.x); }
inline __half __float2half(float v) { return {emulator::to_fp16(v)}; }

#define threadIdx (emulator::thread_id())
#define blockIdx (emulator::S.block_id)
#define blockDim (emulator::S.block)
#define gridDim (emulator::S.grid)
inline void __syncthreads() { emulator::wait(emulator::BLOCK); }
inline void __syncwarp(unsigned = ~0u) { emulator::wait(emulator::WARP); }
template <class T> T __shfl_sync(unsigned, T v, int lane) { return emulator::exchange(v, lane); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return emulator::exchange(v, emulator::lane() ^ mask); }
template <class T> T __shfl_down_sync(unsigned, T v, int by) {
  return emulator::exchange(v, std::min(emulator::lane() + by, emulator::lane() + by < 32 ? 31 : emulator::lane()));
}
inline unsigned __ballot_sync(unsigned, bool p) {
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) {
    int first = emulator::S.current & ~31, v = emulator::exchange((int)p, i);
    if (first + i < emulator::S.threads && !emulator::S.fibers[first + i].done) all |= (unsigned)(v == 1) << i;
  }
  return all;
}
inline bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
inline bool __all_sync(unsigned m, bool p) { return __ballot_sync(m, !p) == 0; }
template <class T> T atomicAdd(T* p, T v) { T old = *p; *p = old + v; ++emulator::S.counters[3]; return old; }
template <class T> T atomicMax(T* p, T v) { T old = *p; if (v > old) *p = v; ++emulator::S.counters[3]; return old; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline int __float_as_int(float x) { return (int)emulator::bits(x); }
inline float __int_as_float(int x) { return emulator::number((uint32_t)x); }

// What Python may ask and say.
extern "C" {
inline __attribute__((used)) const char* mm_emulator_message() { return emulator::S.message; }
inline __attribute__((used)) void mm_emulator_order(int order) { emulator::S.order = order; }
inline __attribute__((used)) void mm_emulator_counters(long long* four) {
  for (int i = 0; i < 4; ++i) four[i] = emulator::S.counters[i], emulator::S.counters[i] = 0;
}
}
