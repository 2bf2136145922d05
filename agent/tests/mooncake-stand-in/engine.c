/* A library that exports two functions of Mooncake's TransferEngine under the names of the C++ compiler (Itanium ABI) and takes
   their arguments as it does (System V x86-64, a Status returned through a hidden pointer), and does nothing. */
#include <stdint.h>

struct vector {
    void *begin, *end, *capacity;
};

__attribute__((noinline)) void *submit(void *status, void *engine, uint64_t batch, const struct vector *requests) __asm__(
    "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE");
__attribute__((noinline)) void *release(void *status, void *engine, uint64_t batch) __asm__(
    "_ZN8mooncake14TransferEngine11freeBatchIDEm");

void *submit(void *status, void *engine, uint64_t batch, const struct vector *requests) {
    __asm__ volatile("" ::"r"(engine), "r"(batch), "r"(requests) : "memory");
    return status;
}

void *release(void *status, void *engine, uint64_t batch) {
    __asm__ volatile("" ::"r"(engine), "r"(batch) : "memory");
    return status;
}
