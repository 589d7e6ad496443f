// What a CPU build of torch lacks before a tensor may say "cuda:1": a device guard, hooks, generators, pinned memory.
//
// libtorch asks a *device guard* which device and which stream are current (the autograd engine does, before every node
// of a backward pass), and *hooks* for everything that only libtorch_cuda knows. Here both keep books and compute
// nothing: a current device and a current stream for each thread, a number of devices, and which memory is pinned.
//
// The library must be loaded before torch is imported, because torch looks for the hooks once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

using namespace c10;

namespace {

constexpr int kMost = 64;
int devices = 0;
thread_local DeviceIndex current = 0;
thread_local StreamId streams[kMost] = {};

Device gpu(DeviceIndex index) { return Device(DeviceType::CUDA, index); }

DeviceIndex exchange(DeviceIndex index) {
  const DeviceIndex before = current;
  if (index >= 0) {
    TORCH_CHECK(index < devices, "CUDA error: invalid device ordinal ", int(index), " of ", devices);
    current = index;
  }
  return before;
}

Stream stream_of(Device device) {
  const DeviceIndex index = device.index() < 0 ? current : device.index();
  return Stream(Stream::UNSAFE, gpu(index), streams[index]);
}

// ------------------------------------------------------------------------------------------------ pinned memory

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // begin of a block -> its bytes

void unpin(void* block) {
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned.erase(static_cast<char*>(block));
  }
  std::free(block);
}

struct PinnedAllocator : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, 64, bytes ? bytes : 64) == 0, "no memory for ", bytes, " pinned bytes");
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[static_cast<char*>(block)] = bytes ? bytes : 64;
    return {block, block, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

// --------------------------------------------------------------------------------------------------- generators

// Numbers come from the CPU's algorithm, under the name of a GPU: a generator of its own, so that what is drawn on the
// GPU does not move the CPU's stream.
struct GpuGenerator : at::CPUGeneratorImpl {
  GpuGenerator(DeviceIndex index, uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = gpu(index);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<GpuGenerator>(index < 0 ? current : index, default_rng_seed_val);
}

// ---------------------------------------------------------------------------------------------- guard and hooks

struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return gpu(current); }
  Device exchangeDevice(Device to) const override { return gpu(exchange(to.index())); }
  void setDevice(Device to) const override { exchange(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.index() >= 0) current = to.index();
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(devices); }
  Stream getStream(Device of) const noexcept override { return stream_of(of); }
  Stream getNewStream(Device of, int = 0) const override { return stream_of(of); }
  Stream exchangeStream(Stream to) const noexcept override {
    const Stream before = stream_of(to.device());
    streams[before.device_index()] = to.id();
    return before;
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());

}  // namespace

namespace at {
namespace rehearsal {

struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasCUDA() const override { return devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return DeviceIndex(devices); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex to) const override { exchange(to); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return exchange(to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchange(to); }
  int getNumGPUs() const override { return devices; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::mutex lock;
    static std::vector<Generator> made(kMost);
    std::lock_guard<std::mutex> hold(lock);
    Generator& one = made[index < 0 ? current : index];
    if (!one.defined()) one = new_generator(index);
    return one;
  }
  Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
};

using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)

}  // namespace rehearsal
}  // namespace at

extern "C" {
void rehearsal_set_devices(int count) { devices = count < kMost ? count : kMost; }
int rehearsal_devices() { return devices; }
int rehearsal_device() { return current; }
int rehearsal_set_device(int index) {
  if (index < 0 || index >= devices) return -1;
  current = DeviceIndex(index);
  return 0;
}
int64_t rehearsal_stream(int index) { return streams[index]; }
void rehearsal_set_stream(int index, int64_t id) { streams[index] = id; }
}
