/* completion.h — counts the requests that are done; wakes the parent once, when its target is reached.
 *
 * Every request that a worker finishes adds one.  The parent, which knows how many it has issued,
 * watches this one word instead of every worker's ring, and sleeps on it.  One 64-bit word:
 *
 *     bits 63..32  done    requests finished since the segment was made (wraps)
 *     bits 31..1   target  the low 31 bits of the count that the parent sleeps for
 *     bit  0       armed   the parent sleeps, or is about to
 *
 * Workers add to `done` and the parent sets `target` and `armed`, all by read-modify-write of the
 * whole word.  So either the parent's arming comes after the last worker's add, and is refused
 * because the target is already reached, or that worker sees `armed`, clears it and wakes.
 * The worker that clears `armed` wakes the parent, so a wake can be early but never missing; clearing
 * changes the half of the word on which the futex sleeps, so a wake before the sleep makes the futex
 * refuse to sleep.
 *
 * The count is only a hint; the completion rings decide.  A worker that dies between its add and its
 * wake costs the parent one park slice (see wait.h).  A worker that dies between its push and its add
 * leaves the count one too low, and damage may give it any value.  So the parent looks at the rings
 * after each slice, and when the count says that all is done.  If the count contradicts the rings, the
 * parent continues with the count that it finds there.
 *
 * A parent that also waits for other things (an event loop) does not sleep on the word, but on an
 * eventfd that it has handed to the workers.  The worker that wakes the parent then also writes to the
 * eventfd.  So nothing changes here, and nobody writes to a parent that has not armed.  There are no
 * slices then.  Instead the pidfd of a dead worker wakes the parent, too, and each time before it arms,
 * the parent continues with the count that it finds in the rings.
 *
 * Workers need to know whether they are among the last of a batch step (wait.h: "Who stays awake").
 * So the parent publishes in advance up to which count it will issue requests.  That is also a hint:
 * all accesses are relaxed, and a wrong number only makes a worker's wait cost more.
 */
#ifndef SHMVEC_COMPLETION_H
#define SHMVEC_COMPLETION_H

#include "fault.h"
#include "platform.h"

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint64_t word;
    _Atomic uint32_t issued; /* the count up to which requests are issued: a hint, see above */
    _Atomic int64_t done_at; /* when a request was last done; shows how late the parent noticed */
} sv_completion;

#define SV_COMPLETION_ARMED UINT64_C(1)
#define SV_COMPLETION_ONE (UINT64_C(1) << 32)

/* Whether `done` is at or past `target`, both modulo 2**31; they are never 2**30 apart. */
static inline bool sv_completion_reached(uint32_t done, uint32_t target)
{
    return ((done - target) & UINT32_C(0x7fffffff)) < UINT32_C(0x40000000);
}

/* Parent: publishes the count up to which requests will be issued. */
static inline void sv_completion_issue(sv_completion *completion, uint32_t count)
{
    /* relaxed: see the essay. */
    atomic_store_explicit(&completion->issued, count, memory_order_relaxed);
}

/* Worker: how many issued requests are still to be done. */
static inline uint32_t sv_completion_left(sv_completion *completion)
{
    /* relaxed: see the essay. */
    uint64_t word = atomic_load_explicit(&completion->word, memory_order_relaxed);
    return atomic_load_explicit(&completion->issued, memory_order_relaxed) - (uint32_t)(word >> 32);
}

/* Parent: how many requests are done. */
static inline uint32_t sv_completion_done(sv_completion *completion)
{
    /* acquire: as in sv_completion_check. */
    return (uint32_t)(atomic_load_explicit(&completion->word, memory_order_acquire) >> 32);
}

/* Parent: whether `target` requests are done. */
static inline bool sv_completion_check(sv_completion *completion, uint32_t target)
{
    /* acquire: pairs with the release of sv_completion_add; the finished rings are visible. */
    uint64_t word = atomic_load_explicit(&completion->word, memory_order_acquire);
    return sv_completion_reached((uint32_t)(word >> 32), target);
}

/* Worker: counts one more request as done, whose results are already published.
 * Returns whether this call woke the parent. */
static inline bool sv_completion_add(sv_completion *completion)
{
    /* relaxed: only a measurement. */
    atomic_store_explicit(&completion->done_at, sv_now_ns(), memory_order_relaxed);
    /* acq_rel: release pairs with the acquire of sv_completion_check and sv_completion_arm;
     * acquire sees the parent's arming. */
    uint64_t word = atomic_fetch_add_explicit(&completion->word, SV_COMPLETION_ONE,
                                              memory_order_acq_rel) +
                    SV_COMPLETION_ONE;
    SV_FAULT(8);
    if (!(word & SV_COMPLETION_ARMED) ||
        !sv_completion_reached((uint32_t)(word >> 32), (uint32_t)word >> 1))
        return false;
    /* acq_rel: in one order with the parent's arming; the one that finds the bit set wakes. */
    if (!(atomic_fetch_and_explicit(&completion->word, ~SV_COMPLETION_ARMED,
                                    memory_order_acq_rel) &
          SV_COMPLETION_ARMED))
        return false;
    sv_futex_wake(sv_low_half(&completion->word), SV_EVERYONE);
    return true;
}

/* Parent: asks to be woken at `target`.  False when it is reached already: do not sleep. */
static inline bool sv_completion_arm(sv_completion *completion, uint32_t target)
{
    /* acquire (here and on failure below): pairs with the release of sv_completion_add. */
    uint64_t word = atomic_load_explicit(&completion->word, memory_order_acquire);
    uint64_t armed;
    do {
        if (sv_completion_reached((uint32_t)(word >> 32), target))
            return false;
        armed = (word & ~UINT64_C(0xffffffff)) | (uint32_t)(target << 1) | SV_COMPLETION_ARMED;
        /* acq_rel: in one order with the workers' adds; see the essay. */
    } while (!atomic_compare_exchange_weak_explicit(&completion->word, &word, armed,
                                                    memory_order_acq_rel, memory_order_acquire));
    return true;
}

/* Parent: sleeps after a successful sv_completion_arm with the same target.
 * Returns 0 (maybe spurious), ETIMEDOUT or EINTR. */
static inline int sv_completion_sleep(sv_completion *completion, uint32_t target,
                                      int64_t timeout_ns)
{
    return sv_futex_wait(sv_low_half(&completion->word),
                         (uint32_t)(target << 1) | (uint32_t)SV_COMPLETION_ARMED, timeout_ns,
                         SV_EVERYONE);
}

#endif
