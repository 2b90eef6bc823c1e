/* platform.h — cache line size, clock, pause, yield and futex, for the architectures of 64-bit Linux.
 *
 * All that differs between architectures is in this file.  It was never built for other systems.
 *
 * Memory shared between processes may be mapped at different addresses, so nothing here stores a
 * pointer in it, and the futex calls never use FUTEX_PRIVATE_FLAG: a private futex is identified by
 * its virtual address, so another process could not wake it.
 */
#ifndef SHMVEC_PLATFORM_H
#define SHMVEC_PLATFORM_H

#if !defined(__linux__) || !defined(__LP64__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shmvec needs 64-bit Linux: futexes, pidfds, memfds, words whose low half comes first"
#endif

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Two 64-byte lines: the adjacent-line prefetcher of x86 pairs them, and Apple and some Arm
 * cores have 128-byte lines. */
#define SV_CACHE_LINE 128

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "atomics shared between processes must be lock-free");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "atomics shared between processes must be lock-free");
_Static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint64_t) == 8,
               "a lock-free atomic has the size of its value");

#define SV_NS_PER_S INT64_C(1000000000)

/* Monotonic time in nanoseconds (vDSO: about 20 ns a call). */
static inline int64_t sv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SV_NS_PER_S + now.tv_nsec;
}

/* A counter that runs at a steady rate.  Reading it is one instruction.  Reading the clock is a call,
 * which waits for all instructions before it and displaces an env's code and data in the caches.  The
 * unit is unknown, and counters of two cores may differ, so it is for measuring, not for deadlines. */
static inline uint64_t sv_ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return (uint64_t)sv_now_ns();
#endif
}

/* Tells the core that this is a spin loop, which saves power and the sibling hyper-thread's time. */
static inline void sv_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* Lets another runnable thread have this core, if there is one. */
static inline void sv_yield(void)
{
    sched_yield();
}

/* The 32 low bits of a 64-bit word, on which a futex can sleep. */
static inline _Atomic uint32_t *sv_low_half(_Atomic uint64_t *word)
{
    return (_Atomic uint32_t *)(void *)word;
}

#define SV_EVERYONE UINT32_MAX /* mask of sv_futex_wait and sv_futex_wake: all sleepers */

/* Sleeps while *word == expected, at most timeout_ns.
 * Returns 0 (woken, or the word had changed), ETIMEDOUT or EINTR; 0 may be spurious. */
static inline int sv_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns,
                                uint32_t mask)
{
    /* FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC deadline. */
    int64_t deadline = sv_now_ns() + timeout_ns;
    struct timespec until = {.tv_sec = (time_t)(deadline / SV_NS_PER_S),
                             .tv_nsec = (long)(deadline % SV_NS_PER_S)};
    if (syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, NULL, mask) == 0)
        return 0;
    return errno == EAGAIN ? 0 : errno;
}

/* Wakes every sleeper of `word` whose mask shares a bit with `mask`. */
static inline void sv_futex_wake(_Atomic uint32_t *word, uint32_t mask)
{
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, mask);
}

#endif
