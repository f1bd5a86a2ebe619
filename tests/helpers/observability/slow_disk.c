/* A disk whose writes at a place (pwrite, as weights are written) take 0.3 s each while the file SLOW_DISK is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*pwrite_call)(int, const void *, size_t, off_t);

static ssize_t slow(const char *name, int file, const void *bytes, size_t size, off_t place) {
    pwrite_call written = (pwrite_call)dlsym(RTLD_NEXT, name);
    const char *flag = getenv("SLOW_DISK");
    if (flag != NULL && access(flag, F_OK) == 0) usleep(300000);
    return written(file, bytes, size, place);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t place) {
    return slow("pwrite", file, bytes, size, place);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off_t place) {
    return slow("pwrite64", file, bytes, size, place);
}
