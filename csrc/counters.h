/* counters.h — what a worker has done so far, for whoever wants to know: envs.stats().
 *
 * One block a worker, on cache lines of its own.  The worker is the only writer, once a request;
 * the parent reads whenever it likes.  The numbers carry no data and order nothing, so all accesses
 * are relaxed: a reader may see one number newer than another, never half of one.
 */
#ifndef SHMVEC_COUNTERS_H
#define SHMVEC_COUNTERS_H

#include "platform.h"

#define SV_COUNTERS(X)                                                                             \
    X(requests)   /* answered */                                                                   \
    X(steps)      /* of single envs */                                                             \
    X(resets)     /* of single envs */                                                             \
    X(step_ns)    /* in env.step, and taking its results */                                        \
    X(reset_ns)   /* in env.reset */                                                               \
    X(pause_ns)   /* waiting for requests, by phase: see wait.h */                                 \
    X(yield_ns)                                                                                    \
    X(park_ns)                                                                                     \
    X(waits)      /* that did not find a request at once */                                        \
    X(parks)      /* sleeps */                                                                     \
    X(late_wakes) /* sleeps that ended more than 100 us after the wake */                          \
    X(wakes)      /* times that it woke the parent */

typedef struct {
#define SV_COUNTER(name) _Atomic uint64_t name;
    alignas(SV_CACHE_LINE) SV_COUNTERS(SV_COUNTER)
#undef SV_COUNTER
} sv_counters;

_Static_assert(sizeof(sv_counters) == SV_CACHE_LINE, "one line a worker");

/* The only writer's store. */
static inline void sv_counter_set(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static inline uint64_t sv_counter_get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

#endif
