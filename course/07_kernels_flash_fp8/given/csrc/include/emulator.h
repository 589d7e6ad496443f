// What `minimegatron/kernels/csrc/device.h` finds in the lab in the place of its own emulator.
#pragma once
#define MM_SHARED(T, name, n) __shared__ T name[n]
#define MM_DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(lab::dynamic_shared)
#define MM_LAUNCH(kernel, ...) 9                     // a text's own launchers are not used: `Kernel` launches
#define MM_RESIDENT(...) 9
