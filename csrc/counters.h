/* counters.h — what a worker has done so far, for whoever wants to know: envs.stats().
 *
 * Each process counts in a plain sv_counts of its own.  A worker publishes it once a request, to
 * its block of sv_counters in the segment, on cache lines of its own; it is the only writer, and
 * the parent reads whenever it likes, as does anybody else who has mapped the segment (top).  The
 * numbers carry no data and order nothing, so all accesses but those of `busy` are relaxed: a reader
 * may see one number newer than another, never half of one.  What a worker has done that is gone the
 * parent adds to a block beside, before the successor begins anew; the parent's own are in its notice.
 *
 * A counter is a line of SV_COUNTERS: both structures, publishing, reading and the names in Python
 * follow.  stats.py says what it means.
 */
#ifndef SHMVEC_COUNTERS_H
#define SHMVEC_COUNTERS_H

#include "platform.h"

#define SV_COUNTERS(X)                                                                             \
    X(requests)   /* answered, or sent by the parent */                                            \
    X(steps)      /* of single envs */                                                             \
    X(resets)     /* of single envs */                                                             \
    X(step_ns)    /* in env.step, and taking its results */                                        \
    X(reset_ns)   /* in env.reset */                                                               \
    X(pause_ns)   /* waiting for the other side, by phase: see wait.h */                           \
    X(yield_ns)                                                                                    \
    X(park_ns)                                                                                     \
    X(waits)      /* that did not find all they waited for at once */                              \
    X(parks)      /* sleeps: at most one a slice */                                                \
    X(late_wakes) /* sleeps that ended more than 100 us after the wake */                          \
    X(wakes)      /* times that it woke the other side */                                          \
    X(late)       /* messages that fitted no ring, and went through the channel */

/* Of the process itself. */
typedef struct {
#define SV_COUNT(name) int64_t name;
    SV_COUNTERS(SV_COUNT)
#undef SV_COUNT
} sv_counts;

/* In the segment. */
typedef struct {
#define SV_COUNTER(name) _Atomic uint64_t name;
    alignas(SV_CACHE_LINE) SV_COUNTERS(SV_COUNTER)
#undef SV_COUNTER
    _Atomic uint64_t busy_since; /* when what it is doing began, */
    _Atomic uint64_t busy;       /* and what that is: an sv_busy, or 0 */
    _Atomic uint64_t process;    /* whose they are: its id, as it sees itself */
    _Atomic uint64_t ran_ns;     /* how long it had a core, and lacked one, before it served */
    _Atomic uint64_t starved_ns;
    _Atomic uint64_t first_env;  /* which envs are the worker's; in the block beside, by the parent */
    _Atomic uint64_t num_envs;
} sv_counters;

_Static_assert(sizeof(sv_counters) % SV_CACHE_LINE == 0, "lines of its own");

/* Where each counter is in an sv_counts. */
static const struct sv_counter_name {
    const char *name;
    size_t offset;
} sv_counter_names[] = {
#define SV_COUNTER_NAME(name) {#name, offsetof(sv_counts, name)},
    SV_COUNTERS(SV_COUNTER_NAME)
#undef SV_COUNTER_NAME
};

#define SV_NUM_COUNTERS (sizeof sv_counter_names / sizeof *sv_counter_names)

static inline int64_t sv_count_at(const sv_counts *counts, size_t offset)
{
    return *(const int64_t *)(const void *)((const char *)counts + offset);
}

/* The only writer's store. */
static inline void sv_counter_set(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static inline uint64_t sv_counter_get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* Worker: makes its counts known. */
static inline void sv_counters_publish(sv_counters *counters, const sv_counts *counts)
{
#define SV_PUBLISH(name) sv_counter_set(&counters->name, (uint64_t)counts->name);
    SV_COUNTERS(SV_PUBLISH)
#undef SV_PUBLISH
}

/* Parent: adds what a worker has done that is gone to what those before it have. */
static inline void sv_counters_keep(sv_counters *past, const sv_counters *gone)
{
#define SV_KEEP(name)                                                                              \
    sv_counter_set(&past->name, sv_counter_get(&past->name) + sv_counter_get(&gone->name));
    SV_COUNTERS(SV_KEEP)
#undef SV_KEEP
}

/* A reader: a process's counts. */
static inline void sv_counters_read(const sv_counters *counters, sv_counts *counts)
{
#define SV_READ(name) counts->name = (int64_t)sv_counter_get(&counters->name);
    SV_COUNTERS(SV_READ)
#undef SV_READ
}

/* What a worker is doing with an env. */
enum sv_doing { SV_IN_STEP, SV_IN_RESET, SV_IN_CALL };

/* That, and with which. */
static inline uint64_t sv_busy(uint32_t env, enum sv_doing doing)
{
    return ((uint64_t)env + 1) << 2 | doing;
}

static inline uint64_t sv_busy_env(uint64_t busy)
{
    return (busy >> 2) - 1;
}

/* Of a damaged segment it may be none of these. */
static inline enum sv_doing sv_busy_doing(uint64_t busy)
{
    return (enum sv_doing)(busy & 3);
}

static inline const char *sv_busy_name(uint64_t busy)
{
    static const char *const names[] = {"step", "reset", "call", "call"};
    return names[busy & 3];
}

/* Worker: begins something; 0 ends it.  The end leaves the time as it is: a reader that has just seen
 * what is being done may take its time only now, and must not see that of nothing. */
static inline void sv_busy_begin(sv_counters *counters, uint64_t busy, int64_t now)
{
    /* release: pairs with the acquire of sv_busy_for, which must not see this with an older time. */
    if (busy != 0)
        atomic_store_explicit(&counters->busy_since, (uint64_t)now, memory_order_relaxed);
    atomic_store_explicit(&counters->busy, busy, memory_order_release);
}

/* Parent: what the worker is doing, and for how long: at most as long as it really has. */
static inline uint64_t sv_busy_for(const sv_counters *counters, int64_t now, int64_t *elapsed)
{
    /* acquire: pairs with the release of sv_busy_begin. */
    uint64_t busy = atomic_load_explicit(&counters->busy, memory_order_acquire);
    uint64_t since = atomic_load_explicit(&counters->busy_since, memory_order_relaxed);
    *elapsed = (int64_t)((uint64_t)now - since); /* unsigned: a damaged one must not overflow */
    return busy;
}

#endif
