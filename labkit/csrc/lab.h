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
//   races                      two threads at one word of shared memory, one of which writes, and no barrier between them.
//                              Told at the next barrier: if not all threads meet it, that is the cause, and is told first
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
#include <limits>

struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
constexpr int warpSize = 32;

#include "lab_access.h"
#include "lab_arrays.h"
#include "lab_threads.h"
#include "lab_math.h"

namespace lab {
inline void begin() {
  L.block = -1, L.ticks = 0, L.line = L.note_line = L.race_line = L.printed = 0, L.note[0] = 0, L.busiest = 0;
  L.sites.clear();
  std::memset(L.counts, 0, sizeof L.counts), std::memset(L.shared_uses, 0, sizeof L.shared_uses);
  for (auto& last : L.last) last.id = -1;
  for (int i = ARRAYS + SHARED; i < ARRAYS + SHARED + 1024 * LOCALS; ++i)
    if (L.regions[i].begin) ++L.regions[i].generation, L.regions[i].begin = nullptr;
  for (auto& writes : L.writes) writes.clear();
  S.met = met, S.hung = hung;
}
inline void array(int i, const char* name, void* begin, int64_t numbers, bool constant) {
  Region& r = L.regions[i];
  r.constant = constant, r.name = name, r.begin = (char*)begin, r.size = 4 * numbers, r.element = 4, r.kind = ARRAY;
  L.writes[i].assign(numbers, 0);
}
inline int end(int error) { return next_block(), error ? error : raced() ? 719 : 0; }
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
