// What the files of the fake share. README.md says what is real and what is not.
#pragma once
#include <stddef.h>

// --- settings: environment variables, read in each process ---

int fake_devices(void);                           // FAKE_CUDA_DEVICES, 1 unless set
void fake_capability(int *major, int *minor);     // FAKE_CUDA_CAPABILITY, 9.0 unless set
int fake_attribute(int attribute);                // of a device; the runtime's and the driver's numbers are the same
void *fake_handle(void);                          // a pointer unlike any other, for streams, events and such

// --- counters: fake_cuda_counters() in runtime.c gives them to Python ---

enum Counter {
    KERNELS,         // launches of torch's own kernels
    TRITON_KERNELS,  // launches through the driver
    MATMULS,         // calls of cuBLAS and cuDNN, each at least one kernel
    COLLECTIVES,
    COMMUNICATORS,
    // calls in which the host waits for the device
    STREAM_WAITS,
    EVENT_WAITS,
    DEVICE_WAITS,
    COPY_WAITS,  // cudaMemcpy, and copies to memory that is not pinned
    REGISTRATIONS,  // cudaHostRegister
    COUNTERS
};

void fake_count(enum Counter counter);

// --- memory: mapped and never touched, so it costs the host nothing ---

void *fake_reserve(size_t size);  // addresses on the current device; NULL: none left
void fake_unreserve(void *start);
int fake_hold(int device, size_t size);  // counts memory as allocated; 0: the device has less
void fake_release(int device, size_t size);
