/* Shifts the clocks of a program. It is preloaded into servers under test and adds the nanoseconds in the file named by
 * WEIR_TEST_CLOCK to the system's time: the first number to the time of day, the second to the time since boot. A change of
 * the file takes effect at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offsets;

__attribute__((constructor)) static void map_offsets(void) {
    const char *path = getenv("WEIR_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offsets = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real ? real(clock, time) : (int)syscall(SYS_clock_gettime, clock, time);
    if (status || !offsets) return status;
    int64_t offset = 0;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) offset = offsets[0];
    if (clock == CLOCK_BOOTTIME) offset = offsets[1];
    int64_t nanos = time->tv_nsec + offset % 1000000000;
    time->tv_sec += offset / 1000000000 + (nanos >= 1000000000) - (nanos < 0);
    time->tv_nsec = nanos + (nanos < 0 ? 1000000000 : 0) - (nanos >= 1000000000 ? 1000000000 : 0);
    return 0;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
