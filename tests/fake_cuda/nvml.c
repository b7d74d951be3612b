// libnvidia-ml, as far as torch's allocator asks it. Its header is in no wheel, so the types are plain.
enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) {
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    static int handle;
    *device = &handle;
    return SUCCESS;
}

// for the text of an OutOfMemoryError
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    *count = 0;
    return SUCCESS;
}

// for expandable segments; torch clears the answer, whose state 0 means that the device has no fabric
int nvmlDeviceGetGpuFabricInfoV(void *device, void *answer) {
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) {
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
    return NOT_SUPPORTED;
}
