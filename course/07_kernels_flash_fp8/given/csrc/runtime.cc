// What the accesses of a learner's kernel call (`lab.h`): bounds, counts, races; barriers and shuffles that say who waits.
//
//   bytes, times               what the kernel asked for, by array; 16 bytes with one float4, 4 with one float
//   sectors                    pieces of 32 bytes that the memory delivers for one instruction of a warp. Lanes that ask
//                              for neighbours share them: 32 floats are 4 sectors, 32 floats a row apart are 32
//   out of bounds, misaligned  the launch ends with 700 or 716, as on a GPU, and says which thread, which array, which line
//   races                      two threads at one word of shared memory, one of which writes, and no barrier between them.
//                              Told at the next barrier: if not all threads meet it, that is the cause, and is told first
//
// Each array lies in 128 GiB of addresses of its own (`place`), so an address beyond its end still says whose end it is. A
// thread that loads the same address twice in a row has it in a register: that counts once; so do the parts of one float4.
// Two accesses belong to one instruction of a warp if they come from the same call for the same time.
#include <sys/mman.h>

#include <cstdarg>
#include <unordered_map>

#include "emulator.h"

struct uint3 { unsigned x, y, z; };
struct Line { const void* at; long long line, part; };            // of a call into this file; part: it loads v.x of *p
struct Named { char* begin; long long size, element; const char* name; };
extern "C" const Line lab_lines[];                   // made by cuda.py from what the compiler says
extern "C" const Named lab_shared[];
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

namespace lab {
using emulator::S;
enum { LOAD, STORE, ATOMIC };
constexpr int ARRAYS = 32, SECTOR = 32;
constexpr uintptr_t BASE = 1ull << 45, ZONE = 1ull << 37;
alignas(128) char dynamic_shared[227 * 1024];        // what a block of an H100 can have

struct Word {                                        // of shared memory: who used it last, and in which epochs
  struct Use { int thread = -1, line = 0; long long serial = -1, block = 0, warp = 0; bool atomic = false; };
  Use wrote, read[2];                                // the two readers are of two warps, or of one
};
struct Shared {
  std::string name;
  char* begin;
  long long size, element;
  unsigned grain = 4;                                // bytes of a word
  std::vector<Word> words;
};
struct Request { int n; uintptr_t sectors[32]; };
struct Site {                                        // a place that loads, or one that stores
  std::vector<uint32_t> times;                       // by thread
  std::vector<std::vector<Request>> warps;           // by warp, then by time
};
struct Array {
  std::string name;
  char *data, *begin, *map;                          // the tensor's memory; its copy; what was mapped for it
  size_t mapped;
  long long size, element;
  bool constant;
  int first;                                         // the array whose memory it shares: itself, if none
  std::vector<unsigned char> writes;                 // of each element
  long long times[2], bytes[2], sectors[2];          // loads, stores
  struct Part { long long chunk, waits; unsigned mask; };
  std::vector<Part> parts;                           // of a float4, by thread
};
struct Last { int id; long long at; size_t bytes; long long waits; };
struct Pending { Shared* r; long long at; size_t bytes; Word::Use now; char old[16]; };
struct Ledger {
  std::vector<Array> arrays;
  std::vector<Shared> shared;
  std::unordered_map<const void*, int> known;        // a return address -> its place
  std::vector<std::pair<int, bool>> places;          // line, part
  std::vector<Site> sites;                           // 2 * place + whether it stores
  Last last[1024];                                   // what each thread loaded last, and before which wait
  int lines[1024];                                   // where each thread was last seen in the text
  long long block = -1, ticks = 0, limit = 0, shared_uses[1024];
  long long busiest = 0;                             // most loads of shared memory by one thread of one block
  int line = 0, column = 0, note_line = 0, race_line = 0, printed = 0, stores = 0;
  bool quiet = false;
  char note[200];
  char race[256];                                    // the first one, until it is known whether a barrier was missed
  Pending pending[8];                                // stores that the thread is about to do
};
static Ledger L;

// A race that was seen is what the launch fails with, whatever comes of it later; but see `met`.
static bool raced() {
  if (L.race_line) std::memcpy(S.message, L.race, sizeof S.message), L.line = L.race_line;
  return L.race_line;
}
template <class... A> [[noreturn]] static void stop(int error, int line, const char* format, A... a) {
  if (!raced()) std::snprintf(S.message, sizeof S.message, format, a...), L.line = line;
  emulator::stop(L.race_line ? 719 : error);
}
// No error by itself: it is told when the result is wrong.
template <class... A> static void note(int line, const char* format, A... a) {
  if (L.note_line) return;
  L.note_line = line;
  std::snprintf(L.note, sizeof L.note, format, a...);
}
static int place_of(const void* site) {
  auto found = L.known.find(site);
  if (found != L.known.end()) return found->second;
  L.places.emplace_back(0, false);
  return L.known[site] = (int)L.places.size() - 1;
}
static void next_block() {
  for (auto& site : L.sites) {
    for (auto& warp : site.warps) warp.clear();
    std::fill(site.times.begin(), site.times.end(), 0u);
  }
  for (long long& n : L.shared_uses) L.busiest = std::max(L.busiest, n), n = 0;
  L.block = S.serial;
}

// --------------------------------------------------------------------------------------------------- shared memory
static bool before(const Word::Use& use, const Word::Use& now) {  // whether a barrier stands between them
  return use.serial != now.serial || use.thread == now.thread || use.block < now.block ||
         (use.thread / 32 == now.thread / 32 && use.warp < now.warp);
}
static void race(const Shared& r, long long number, const Word::Use& other, const char* did, const char* does, const Word::Use& now) {
  if (L.race_line) return;
  L.race_line = now.line;
  std::snprintf(L.race, sizeof L.race, "a race: thread %d of block %u %s %s[%lld], which thread %d %s at line %d, and no "
                "__syncthreads() is between", now.thread, S.block_id.x, does, r.name.c_str(), number, other.thread, did, other.line);
}
static void watch(Shared& r, long long at, size_t bytes, bool store, bool same, const Word::Use& now) {
  if (!store) ++L.shared_uses[now.thread];
  while (at % r.grain || bytes % r.grain) {          // smaller words: bf16, bool
    std::vector<Word> halves(2 * r.words.size());
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = r.words[i / 2];
    r.words.swap(halves), r.grain /= 2;
  }
  for (size_t i = at / r.grain; i * r.grain < at + bytes; ++i) {
    Word& word = r.words[i];
    const long long number = i * r.grain / r.element;
    const bool both = now.atomic && word.wrote.atomic;
    if (word.wrote.serial != now.serial && (!store || now.atomic))
      note(now.line, "thread %d of block %u reads %s[%lld], which was never written", now.thread, S.block_id.x, r.name.c_str(), number);
    if (!both && !same && !before(word.wrote, now)) race(r, number, word.wrote, "writes", store ? "writes" : "reads", now);
    if (!store || now.atomic) {
      auto& first = word.read[0];
      if (first.thread != now.thread || first.serial != now.serial) word.read[1] = first;
      first = now;
    }
    if (!store) continue;
    for (auto& use : word.read)
      if (!same && !(now.atomic && use.atomic) && !before(use, now)) race(r, number, use, "reads", "writes", now);
    word.wrote = now;
  }
}
// Stores are judged when they are done: one that changes nothing is no race.
static void settle() {
  for (int i = 0; i < L.stores; ++i) {
    Pending& p = L.pending[i];
    watch(*p.r, p.at, p.bytes, true, !std::memcmp(p.r->begin + p.at, p.old, p.bytes), p.now);
  }
  L.stores = 0;
}

// ----------------------------------------------------------------------------------------------------- one access
static void count(int id, long long at, size_t bytes, bool store, int place) {
  Array& array = L.arrays[id];
  const long long waits = S.counters[1] + S.counters[2];
  if (!store && L.places[place].second) {            // v.x: one load with the other parts of v
    auto& part = array.parts[S.current];
    const unsigned mask = ((1u << bytes) - 1) << (at & 15);
    const bool known = part.chunk == at / 16 && part.waits == waits;
    const unsigned added = known ? mask & ~part.mask : 0;
    part = {at / 16, waits, known ? part.mask | mask : mask};
    if (known) { array.bytes[0] += __builtin_popcount(added); return; }
  }
  Last& last = L.last[S.current];
  if (!store && last.id == id && last.at == at && last.bytes == bytes && last.waits == waits) return;  // in a register
  if (!store) last = {id, at, bytes, waits};
  array.bytes[store] += bytes, ++array.times[store];
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
  if (request.n < 32) request.sectors[request.n++] = sector, ++array.sectors[store];
}
static const char* verb(int how) { return how == LOAD ? "reads" : how == STORE ? "writes" : "changes"; }
static void in_array(int id, long long at, size_t bytes, int how, int line, int place) {
  Array& r = L.arrays[id];
  if (how != STORE) {
    count(id, at, bytes, false, place);
    if (!r.constant && !r.writes[at / r.element])
      note(line, "thread %d of block %u reads %s[%lld] before the kernel has written it", S.current, S.block_id.x, r.name.c_str(), at / r.element);
  }
  if (how == LOAD) return;
  count(id, at, bytes, true, place);
  for (long long i = at / r.element; i * r.element < at + (long long)bytes; ++i) r.writes[i] += r.writes[i] < 255;
}
static void in_shared(Shared& r, long long at, size_t bytes, int how, int line) {
  const Word::Use now{S.current, line, S.serial, S.block_epoch, S.warp_epochs[S.current / 32], how == ATOMIC};
  if (how != STORE || bytes > sizeof L.pending[0].old || L.stores == 8) return watch(r, at, bytes, how != LOAD, false, now);
  Pending& p = L.pending[L.stores++];
  p = {&r, at, bytes, now, {}};
  std::memcpy(p.old, r.begin + at, bytes);
}
// Where an address is: 0 in an array, 1 in shared memory, 2 elsewhere in memory of this thread or of its text, which is its own
// affair. Stops the launch if it is nowhere, or beyond the end of what it is in. Below `frame` are functions that have ended.
static int find(const char* at, size_t bytes, int how, int line, const char* frame, int& id) {
  const auto& fiber = S.fibers[S.current];
  if (at >= fiber.stack && at < fiber.stack + emulator::STACK) {
    if (at < frame)
      stop(700, line, "thread %d %s an array of a function that has ended", S.current, verb(how));
    return 2;
  }
  const long long size = bytes;
  id = (int)(((uintptr_t)at - BASE) / ZONE);
  if ((uintptr_t)at >= BASE && id < (int)L.arrays.size()) {
    const Array& r = L.arrays[id];
    const long long where = at - r.begin;
    if (where < 0 || where > r.size - size)
      stop(700, line, "thread %d of block %u %s %s[%lld]; it has %lld numbers", S.current, S.block_id.x, verb(how), r.name.c_str(),
           (where < 0 ? where - r.element + 1 : where) / r.element, r.size / r.element);
    return 0;
  }
  for (id = 0; id < (int)L.shared.size(); ++id) {
    const Shared& r = L.shared[id];
    const long long where = at - r.begin, gap = r.begin == dynamic_shared ? sizeof dynamic_shared - r.size : 128;
    if (where < 0 || where >= r.size + gap) continue;
    if (where > r.size - size)
      stop(700, line, "thread %d of block %u %s %s[%lld]; it has %lld numbers%s", S.current, S.block_id.x, verb(how), r.name.c_str(),
           where / r.element, r.size / r.element, r.begin == dynamic_shared ? ": the launch says shared_mem=bytes" : "");
    return 1;
  }
  if (at >= __ehdr_start && at < _end) return 2;     // a table of constants, a variable of the text
  for (int i = 0; i < S.threads; ++i)
    if (at >= S.fibers[i].stack && at < S.fibers[i].stack + emulator::STACK)
      stop(700, line, "thread %d %s a variable of thread %d: only shared and global memory is for all", S.current, verb(how), i);
  stop(700, line, "thread %d of block %u uses a pointer that points to no array", S.current, S.block_id.x);
}
static void access(const void* address, size_t bytes, int how, int line, const void* site, const char* frame) {
  if (!S.running) return;                            // a launcher's own code
  settle();
  const char* at = (const char*)address;
  if (at >= frame && at < S.fibers[S.current].stack + emulator::STACK) return;
  const int place = place_of(site);
  if (line < 0) line = L.places[place].first;
  if (line) L.lines[S.current] = line;
  else line = L.lines[S.current];
  if (L.block != S.serial) next_block();
  S.counters[3] += how == ATOMIC;
  int id;
  const int where = find(at, bytes, how, line, frame, id);
  if (where == 0) in_array(id, at - L.arrays[id].begin, bytes, how, line, place);
  if (where == 1) in_shared(L.shared[id], at - L.shared[id].begin, bytes, how, line);
}
void touch(const void* at, size_t bytes, int how, int line, const void* site) {
  access(at, bytes, how, line, site, (const char*)__builtin_dwarf_cfa());
}
// An access of a size that is no power of two, or to less than its multiples: piece by piece, as a GPU does it.
static void range(const void* address, size_t bytes, int how, const void* site, const char* frame) {
  const char* at = (const char*)address;
  for (size_t done = 0, piece; done < bytes; done += piece) {
    for (piece = 16; piece > bytes - done || (uintptr_t)(at + done) % piece;) piece /= 2;
    access(at + done, piece, how, -1, site, frame);
  }
}

// ------------------------------------------------------------------------------------------------ threads together
static void here(int line, const void* site = nullptr) {
  settle();
  S.lines[S.current] = L.lines[S.current] = line;
  if (site) S.sites[S.current] = place_of(site);
}
void barrier(int line, const void* site) { here(line, site), emulator::wait(emulator::BLOCK); }
int vote(int line, const void* site, bool yes) {
  S.slots[S.current] = yes;
  barrier(line, site);
  int all = 0;
  for (int i = 0; i < S.threads; ++i) all += S.slots[i] == 1;
  barrier(line, site);
  return all;
}
// Before a barrier opens: all threads must be there, at the same one.
static int met() {
  int first = -1, last = -1, gone = -1;
  for (int i = 0; i < S.threads; ++i) {
    if (S.fibers[i].done) { if (gone < 0) gone = i; continue; }
    if (first < 0) first = i;
    if (S.sites[i] != S.sites[first] && last < 0) last = i;
  }
  if (gone < 0 && last < 0) return raced() ? 719 : 0;
  L.line = S.lines[first];
  const char* must = "all threads must meet the same one, so none stands in an `if` that only some threads enter";
  if (gone >= 0) std::snprintf(S.message, sizeof S.message, "thread %d of block %u did not meet the barrier of line %d, where thread %d "
                               "waits, and has ended: %s", gone, S.block_id.x, S.lines[first], first, must);
  else std::snprintf(S.message, sizeof S.message, "thread %d of block %u did not meet the barrier of line %d, where thread %d waits; it "
                     "waits at that of line %d: %s", last, S.block_id.x, S.lines[first], first, S.lines[last], must);
  return 702;
}
// No thread can go on: a lane waits for another one that its mask names, and which waits elsewhere.
static int hung() {
  for (int i = 0; i < S.threads; ++i)
    for (int lane = 0, first = i & ~31; lane < 32 && S.fibers[i].wait == emulator::WARP && !S.fibers[i].done; ++lane) {
      const int j = first + lane;
      if (!(S.masks[i] >> lane & 1) || j >= S.threads || S.fibers[j].done) continue;
      const bool there = S.fibers[j].wait == emulator::WARP;
      if (there && S.masks[j] == S.masks[i]) continue;
      L.line = S.lines[i];
      std::snprintf(S.message, sizeof S.message, "thread %d waits in a shuffle or __syncwarp whose mask 0x%x names lane %d, too; "
                    "thread %d waits at the %s of line %d", i, S.masks[i], lane, j,
                    there ? "one with another mask" : "__syncthreads()", S.lines[j]);
      return 702;
    }
  return 0;
}
static void among(unsigned mask, int line, const char* what) {
  here(line), S.masks[S.current] = mask;
  if (!(mask >> (S.current & 31) & 1))
    stop(719, line, "thread %d calls %s with the mask 0x%x, which does not name its own lane %d", S.current, what, mask, S.current & 31);
}
void warp_barrier(unsigned mask, int line) { among(mask, line, "__syncwarp"), emulator::wait(emulator::WARP); }
uint64_t shuffle(uint64_t mine, int from, unsigned mask, int line, const char* what) {
  const int me = S.current, there = (me & ~31) + from;
  among(mask, line, what);
  S.slots[me] = mine;
  emulator::wait(emulator::WARP);
  const bool named = mask >> from & 1, live = there < S.threads && !S.fibers[there].done;
  if (!named || !live)
    note(line, "thread %d takes a value from lane %d, which %s", me, from,
         !live ? "is not there: the warp has fewer threads, or it has ended, or it did not come to this shuffle" : "the mask does not name");
  const uint64_t bits = named && live ? S.slots[there] : ~0ull;
  S.masks[me] = mask;
  emulator::wait(emulator::WARP);
  return bits;
}
unsigned ballot(unsigned mask, bool yes, int line, const char* what) {
  among(mask, line, what);
  S.slots[S.current] = yes;
  emulator::wait(emulator::WARP);
  unsigned all = 0;
  for (int i = 0, first = S.current & ~31; i < 32; ++i)
    if (mask >> i & 1 && first + i < S.threads && !S.fibers[first + i].done) all |= (unsigned)(S.slots[first + i] == 1) << i;
  S.masks[S.current] = mask;
  emulator::wait(emulator::WARP);
  return all;
}
int width_of(int width, int line) {
  if (width < 1 || width > 32 || width & (width - 1)) stop(9, line, "a shuffle among %d lanes: 1, 2, 4, 8, 16 or 32", width);
  return width;
}
int lane() { return S.current & 31; }
uint3 thread_id() { const dim3 t = emulator::thread_id(); return {t.x, t.y, t.z}; }
uint3 block_id() { return {S.block_id.x, S.block_id.y, S.block_id.z}; }
uint3 block_dim() { return {S.block.x, S.block.y, S.block.z}; }
uint3 grid_dim() { return {S.grid.x, S.grid.y, S.grid.z}; }
long long clock() { return L.ticks; }
void failed(const char* what, int line) { stop(710, line, "thread %d of block %u: %s", S.current, S.block_id.x, what); }
int print(const char* format, ...) {
  if (L.quiet || ++L.printed > 2000) return 0;
  va_list values;
  va_start(values, format);
  const int n = std::vprintf(format, values);
  va_end(values);
  std::fflush(stdout);
  return n;
}

// ---------------------------------------------------------------------------------------------------------- a launch
// Each tensor is copied to addresses of its own; tensors that share memory share that of the copy.
static bool place_arrays() {
  for (size_t i = 0; i < L.arrays.size(); ++i) {
    Array& one = L.arrays[i];
    char *low = one.data, *high = one.data + one.size;
    one.first = (int)i;
    for (size_t k = 0; k < L.arrays.size(); ++k)     // all that touch [low, high)
      if (auto& other = L.arrays[k]; other.data < high && other.data + other.size > low && (other.data < low || other.data + other.size > high))
        low = std::min(low, other.data), high = std::max(high, other.data + other.size), k = -1;
    for (size_t k = i; k-- > 0;)
      if (L.arrays[k].data < high && L.arrays[k].data + L.arrays[k].size > low) one.first = (int)k;
    const size_t off = (uintptr_t)low & 255;
    char* want = (char*)(BASE + i * ZONE + ZONE / 2);
    one.mapped = (off + (high - low) + 4096) & ~4095ull;
    void* got = one.first == (int)i
        ? mmap(want, one.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
        : mremap(L.arrays[one.first].map, 0, one.mapped, MREMAP_MAYMOVE | MREMAP_FIXED, want);
    if (got != want) return false;
    one.map = want, one.begin = want + off + (one.data - low);
    if (one.first == (int)i) std::memcpy(want + off, low, high - low);
  }
  return true;
}
static void fetch_arrays() {
  for (auto& one : L.arrays) {
    if (one.map && !one.constant) std::memcpy(one.data, one.begin, one.size);
    if (one.map) munmap(one.map, one.mapped);
    one.map = nullptr;
  }
}
int launch(const unsigned* grid, const unsigned* block, size_t shared, void (*body)(void*), void* with) {
  if (L.places.empty())
    for (const Line* one = lab_lines; one->at; ++one) L.places[place_of(one->at)] = {(int)one->line, one->part != 0};
  L.shared.clear(), S.shared.clear();
  for (const Named* one = lab_shared; one->name; ++one) {
    const bool dynamic = one->begin == dynamic_shared;
    L.shared.push_back({one->name, one->begin, dynamic ? (long long)shared : one->size, one->element, 4, {}});
    L.shared.back().words.resize((L.shared.back().size + 3) / 4);
    S.shared.emplace_back(L.shared.back().begin, L.shared.back().size);
  }
  L.block = -1, L.ticks = 0, L.line = L.column = L.note_line = L.race_line = L.printed = L.stores = 0, L.note[0] = 0, L.busiest = 0;
  L.sites.clear();
  std::memset(L.shared_uses, 0, sizeof L.shared_uses), std::memset(L.lines, 0, sizeof L.lines);
  for (auto& last : L.last) last.id = -1;
  S.met = met, S.hung = hung;
  const int error = emulator::launch(dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared,
                                     [=] { body(with), settle(); });
  next_block();
  return error ? error : raced() ? 719 : 0;
}
}  // namespace lab

// -------------------------------------------------------------------------------------------- what the compiler calls
#define SITE __builtin_return_address(0)
#define CALLER SITE, (const char*)__builtin_dwarf_cfa()
#define TSAN(n)                                                                                                           \
  void __tsan_read##n(void* p) { lab::access(p, n, lab::LOAD, -1, CALLER); }                                                 \
  void __tsan_write##n(void* p) { lab::access(p, n, lab::STORE, -1, CALLER); }                                               \
  void __tsan_unaligned_read##n(void* p) { lab::range(p, n, lab::LOAD, CALLER); }                                           \
  void __tsan_unaligned_write##n(void* p) { lab::range(p, n, lab::STORE, CALLER); }                                         \
  void __tsan_volatile_read##n(void* p) { lab::access(p, n, lab::LOAD, -1, CALLER); }                                        \
  void __tsan_volatile_write##n(void* p) { lab::access(p, n, lab::STORE, -1, CALLER); }
struct Source { const char* file; unsigned line, column; };
struct Type { uint16_t kind, info; char name[1]; };
extern "C" {
TSAN(1) TSAN(2) TSAN(4) TSAN(8) TSAN(16)
void __tsan_read_range(void* p, size_t n) { lab::range(p, n, lab::LOAD, CALLER); }
void __tsan_write_range(void* p, size_t n) { lab::range(p, n, lab::STORE, CALLER); }
void* lab_memcpy(void* to, const void* from, size_t n) {
  lab::range(from, n, lab::LOAD, CALLER), lab::range(to, n, lab::STORE, CALLER);
  return std::memmove(to, from, n);
}
void* lab_memmove(void* to, const void* from, size_t n) {
  lab::range(from, n, lab::LOAD, CALLER), lab::range(to, n, lab::STORE, CALLER);
  return std::memmove(to, from, n);
}
void* lab_memset(void* to, int byte, size_t n) { return lab::range(to, n, lab::STORE, CALLER), std::memset(to, byte, n); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __sanitizer_cov_trace_pc() {
  using namespace lab;
  if (!S.running) return;
  if (++L.ticks > L.limit) {
    const int line = L.places[place_of(SITE)].first;
    stop(702, line ? line : L.lines[S.current], "stuck: after %lld steps of its loops the kernel is still not done", L.limit);
  }
  if ((char*)__builtin_frame_address(0) < S.fibers[S.current].stack + 1024)
    stop(719, L.places[place_of(SITE)].first, "thread %d needs more than %zu bytes of stack", S.current, emulator::STACK);
}
void __ubsan_handle_out_of_bounds(const void* data, uintptr_t index) {
  using namespace lab;
  struct Data { Source at; const Type *array, *index; };
  const Data& d = *(const Data*)data;
  if (!S.running) return;
  const int bits = 1 << (d.index->info >> 1);
  long long number = (long long)index;
  if (bits < 64) number = d.index->info & 1 ? number << (64 - bits) >> (64 - bits) : number & ((1ll << bits) - 1);
  const char* size = std::strchr(d.array->name, '[');
  L.column = d.at.column;
  stop(700, d.at.line, "thread %d of block %u uses ?[%lld]; it has %lld numbers", S.current, S.block_id.x, number, size ? std::atoll(size + 1) : 0);
}
void __ubsan_handle_type_mismatch_v1(const void* data, uintptr_t pointer) {
  using namespace lab;
  struct Data { Source at; const Type* type; unsigned char log, kind; };
  const Data& d = *(const Data*)data;
  if (!S.running) return;
  const size_t multiple = 1ull << d.log;
  const int how = d.kind == 1 ? STORE : LOAD;
  int id;
  const int where = find((const char*)pointer, multiple, how, d.at.line, (const char*)__builtin_dwarf_cfa(), id);
  char name[64] = "";
  for (const char* p = d.type->name; *p && std::strlen(name) < 60; ++p)
    if (*p != '\'') std::strncat(name, p, 1);
  const char* type = std::strncmp(name, "const ", 6) ? name : name + 6;
  if (!std::strncmp(type, "struct ", 7)) type += 7;
  const char* array = where == 0 ? L.arrays[id].name.c_str() : where == 1 ? L.shared[id].name.c_str() : "a variable";
  const long long at = where == 0 ? ((char*)pointer - L.arrays[id].begin) / L.arrays[id].element
      : where == 1 ? ((char*)pointer - L.shared[id].begin) / L.shared[id].element : 0;
  stop(716, d.at.line, "thread %d of block %u %s %s[%lld] as %s: no multiple of %zu bytes", S.current, S.block_id.x, verb(how), array, at,
       type, multiple);
}
void __ubsan_handle_divrem_overflow(const void* data, uintptr_t, uintptr_t by) {
  using namespace lab;
  if (S.running) stop(719, ((const Source*)data)->line, "thread %d of block %u divides by %s", S.current, S.block_id.x, by ? "-1, and the result is too large" : "0");
}

// What Python may ask and say.
void lab_begin() { lab::L.arrays.clear(); }
void lab_array(const char* name, void* data, long long size, long long element, int constant) {
  lab::Array one{};
  one.name = name, one.data = (char*)data, one.size = size, one.element = element, one.constant = constant;
  one.writes.assign(size / element, 0), one.parts.assign(1024, {-1, -1, 0});
  lab::L.arrays.push_back(one);
}
// The address of each array, for the kernel's arguments; 0 if there is no room for them.
int lab_place(void** begins) {
  const bool placed = lab::place_arrays();
  for (size_t i = 0; i < lab::L.arrays.size(); ++i) begins[i] = lab::L.arrays[i].begin;
  return placed;
}
void lab_fetch() { lab::fetch_arrays(); }
void lab_limit(long long steps, int quiet, int order) {
  lab::L.limit = steps, lab::L.quiet = quiet, lab::S.order = order;
  std::memset(lab::S.counters, 0, sizeof lab::S.counters);
}
const char* lab_message() { return lab::S.message; }
const char* lab_note() { return lab::L.note; }
// Lines, a column, the busiest thread, blocks and waits of all threads, then arrays: loads, stores.
void lab_numbers(long long* to) {
  *to++ = lab::L.line, *to++ = lab::L.column, *to++ = lab::L.note_line, *to++ = lab::L.busiest;
  for (long long n : lab::S.counters) *to++ = n;
  for (auto& one : lab::L.arrays)
    for (int store = 0; store < 2; ++store) *to++ = one.times[store], *to++ = one.bytes[store], *to++ = one.sectors[store];
}
void lab_writes(int array, unsigned char* to) {
  std::memcpy(to, lab::L.arrays[array].writes.data(), lab::L.arrays[array].writes.size());
}
}
