/* Calls the library as an engine does. Arguments: the library, bytes from one request to the next. Reads lines from standard input:
   "s BATCH N ADDRESS LENGTH STEP" submits N writes of LENGTH bytes at ADDRESS, ADDRESS + STEP, …; "r …" the same as reads; "x BATCH"
   submits a vector that cannot be read; "f BATCH" frees; "t N" submits and frees N times and prints the nanoseconds of CPU time. Prints "ok"
   after each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct vector {
    char *begin, *end, *capacity;
};
typedef void *(*submit_t)(void *, void *, uint64_t, const struct vector *);
typedef void *(*free_t)(void *, void *, uint64_t);

int main(int argc, char **argv) {
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", argc == 3 ? dlerror() : "two arguments");
        return 1;
    }
    size_t stride = strtoul(argv[2], NULL, 0);
    submit_t submit = (submit_t)dlsym(
        library, "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE");
    free_t release = (free_t)dlsym(library, "_ZN8mooncake14TransferEngine11freeBatchIDEm");
    char line[256], status[16], engine[16];
    printf("ok\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        uint64_t batch = 0, n = 0, address = 0, length = 0, step = 0;
        char what = line[0];
        sscanf(line + 1, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &batch, &n, &address, &length, &step);
        if (what == 's' || what == 'r') {
            char *all = calloc(n ? n : 1, stride);
            for (uint64_t i = 0; i < n; i++) {
                char *one = all + i * stride;
                uint32_t code = what == 's';
                uint64_t at = address + i * step, target = 3;
                memset(one + 4, 0x5a, stride - 4);
                memcpy(one, &code, 4);
                memcpy(one + 16, &target, 8);
                memcpy(one + 24, &at, 8);
                memcpy(one + 32, &length, 8);
            }
            struct vector requests = {all, all + n * stride, all + n * stride};
            submit(status, engine, batch, &requests);
            free(all);
        } else if (what == 'x') {
            submit(status, engine, batch, (struct vector *)16);
        } else if (what == 'f') {
            release(status, engine, batch);
        } else if (what == 't') {
            char *all = calloc(44, stride);
            struct vector requests = {all, all + 44 * stride, all + 44 * stride};
            struct timespec a, b;
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
            for (uint64_t i = 0; i < batch; i++) {
                submit(status, engine, i, &requests);
                release(status, engine, i);
            }
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
            printf("%lld\n", (b.tv_sec - a.tv_sec) * 1000000000LL + b.tv_nsec - a.tv_nsec);
            free(all);
        }
        printf("ok\n");
        fflush(stdout);
    }
    return 0;
}
