// NCCL whose collectives move nothing. With FAKE_CUDA_LOG=PATH, PATH.RANK lists communicators and collectives in the
// order in which this process called them:
//   communicator 1: rank 0 of 4
//   1 all_gather 4096 float32
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct ncclComm {
    int number;  // from 1, in the order in which they are made
    int rank;
    int size;
};

static const char *const TYPE_NAMES[] = {"int8",    "uint8",   "int32",    "uint32",      "int64",      "uint64",
                                         "float16", "float32", "float64",  "bfloat16",    "float8e4m3", "float8e5m2"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static FILE *log_file(void) {  // NULL: none is wanted
    static FILE *file = NULL;
    const char *path = getenv("FAKE_CUDA_LOG");
    if (file || !path)
        return file;
    const char *rank = getenv("RANK");
    char name[4096];
    snprintf(name, sizeof name, "%s.%s", path, rank ? rank : "0");
    file = fopen(name, "w");
    return file;
}

static ncclResult_t make(ncclComm_t *communicator, int rank, int size) {
    static int made = 0;
    fake_count(COMMUNICATORS);
    *communicator = malloc(sizeof **communicator);
    pthread_mutex_lock(&lock);
    **communicator = (struct ncclComm){++made, rank, size};
    FILE *file = log_file();
    if (file) {
        fprintf(file, "communicator %d: rank %d of %d\n", made, rank, size);
        fflush(file);
    }
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

static ncclResult_t collective(const char *name, size_t count, ncclDataType_t type, ncclComm_t communicator) {
    fake_count(COLLECTIVES);
    pthread_mutex_lock(&lock);
    FILE *file = log_file();
    if (file) {
        fprintf(file, "%d %s %zu %s\n", communicator->number, name, count, TYPE_NAMES[type]);
        fflush(file);
    }
    pthread_mutex_unlock(&lock);
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 1, sizeof *id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int size, ncclUniqueId id, int rank) {
    return make(communicator, rank, size);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    return make(communicator, rank, size);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *communicator, int size, int rank, int ids, ncclUniqueId *id,
                                      ncclConfig_t *config) {
    return make(communicator, rank, size);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int rank, ncclComm_t *communicator, ncclConfig_t *config) {
    return make(communicator, rank, 0);  // NCCL learns the size from the other ranks
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *count) {
    *count = communicator->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
    return collective("all_gather", count, type, communicator);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
    return collective("all_reduce", count, type, communicator);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t communicator, cudaStream_t stream) {
    return collective("reduce_scatter", count, type, communicator);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
    return collective("broadcast", count, type, communicator);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
    return collective("reduce", count, type, communicator);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return collective("send", count, type, communicator);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
    return collective("recv", count, type, communicator);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                          cudaStream_t stream) {
    return collective("all_to_all", count, type, communicator);
}
#endif
