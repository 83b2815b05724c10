/* Sets the wall clock of one process, while it runs, and leaves its monotonic clocks alone: what `settimeofday` does to a
 * machine. The file RC_SET_CLOCK holds three numbers of 64 bits: whose clock is off, by its pid, by how many seconds, and how
 * often it was read so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *setting;
static int (*read_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("RC_SET_CLOCK");
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, 24, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (mapped != MAP_FAILED) setting = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!read_clock) read_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = read_clock(clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (!failed && is_wall && setting && setting[1] && setting[0] == getpid()) {
    now->tv_sec += setting[1];
    __sync_fetch_and_add(&setting[2], 1);
  }
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &precise);
  *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
  return failed;
}

time_t time(time_t *kept) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (kept) *kept = precise.tv_sec;
  return precise.tv_sec;
}
