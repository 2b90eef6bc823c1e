/* counters.h — counters of each process's work, waits and faults so far, for envs.stats() and top.
 *
 * Each process counts in a plain sv_counts of its own.  A worker publishes it once a request, to
 * its block of sv_counters in the segment, on cache lines of its own; the worker is the only writer,
 * and the parent, or another process that has mapped the segment (top), reads at any time.  The
 * numbers carry no data and order nothing, so all accesses but those of `busy` are relaxed: a reader
 * may see one number newer than another, never half of one.  When a worker has ended, the parent adds
 * its counters to a second block (`past`), before the successor begins at zero.  The parent's own
 * counters are in its notice (notice.h).
 *
 * A counter is a line of one of the tables below.  The rest is generated from it: these structures
 * and the functions on them; the declaration for Cython, which setup.py writes; the attributes of
 * stats() and their docstrings; the columns of its table and of top; top's metrics for Prometheus.
 */
#ifndef SHMVEC_COUNTERS_H
#define SHMVEC_COUNTERS_H

#include "platform.h"

/* X(name, heading of its column in tables ("": no column), docstring).  In Python a counter with a
 * name in _ns is in seconds, under a name in _s. */
#define SV_WAITS(X) /* of parent and workers; wait.h explains the phases */                        \
    X(requests, "", "Requests: sent by the parent, answered by a worker.")                         \
    X(waits, "", "Times that it did not find all it waited for at once.")                          \
    X(pause_ns, "", "Seconds spun on the core's pause instruction.")                               \
    X(yield_ns, "", "Seconds spun on ``sched_yield``.")                                            \
    X(park_ns, "", "Seconds asleep; of the parent also those of a wait that is not over.")         \
    X(parks, "", "Times that it went to sleep; a long sleep is taken in slices of 50 ms.")         \
    X(late_wakes, "", "Sleeps that ended more than 100 µs after they should have.")                \
    X(wakes, "", "Times that it woke the other side, which takes a system call.")

#define SV_WORK(X) /* of workers */                                                                \
    X(steps, "steps", "Steps of its envs.")                                                        \
    X(resets, "resets", "Resets of its envs.")                                                     \
    X(step_ns, "in step", "Seconds in ``env.step``, and taking its results.")                      \
    X(reset_ns, "in reset", "Seconds in ``env.reset``.")                                           \
    X(wrappers_ns, "", "Seconds in wrappers that are not compiled, around compiled ones: estimated.")  \
    X(late, "", "Messages that fitted no ring, and went through the worker's socket.")

#define SV_ON_CORES(X) /* of workers' processes, by the system: since they serve */                \
    X(cpu_ns, "CPU", "Seconds that its process has run.")                                         \
    X(starved_ns, "starved", "Seconds that it could have run, and others had the cores.")

#define SV_FAULTS(X) /* by the parent, in its notice */                                            \
    X(crashes, "", "Workers that died.")                                                           \
    X(errors, "", "Exceptions in envs.")                                                           \
    X(timeouts, "", "Steps and resets that took too long.")                                        \
    X(restarts, "", "Workers started in place of others, also by ``restart`` and such.")           \
    X(resets, "", "Envs that were reset for it.")                                                  \
    X(restart_ns, "", "Seconds that the caller has waited for such workers, once they are up.")

#define SV_COUNTERS(X) SV_WAITS(X) SV_WORK(X)

/* The counts of a process, in its own memory. */
typedef struct {
#define SV_COUNT(name, heading, help) int64_t name;
    SV_COUNTERS(SV_COUNT)
#undef SV_COUNT
} sv_counts;

/* An operation in progress, in the segment.  It has one writer. */
typedef struct {
    _Atomic uint64_t since; /* when it began */
    _Atomic uint64_t busy;  /* what it is: an sv_busy, or 0 */
} sv_activity;

/* The counters of a worker, in the segment. */
typedef struct {
#define SV_COUNTER(name, heading, help) _Atomic uint64_t name;
    alignas(SV_CACHE_LINE) SV_COUNTERS(SV_COUNTER)
    sv_activity activity;
    _Atomic uint64_t overlaps;   /* whether it may be busy with several envs at once */
    _Atomic uint64_t process;    /* the worker's process id, in its own namespace */
    SV_ON_CORES(SV_COUNTER)      /* how much that was before it served */
    _Atomic uint64_t first_env;  /* the worker's envs; only in its `past` block, by the parent */
    _Atomic uint64_t num_envs;
} sv_counters;

_Static_assert(sizeof(sv_counters) % SV_CACHE_LINE == 0, "lines of its own");

/* A line of a table, and the offset of its counter in the structure; the last line has no name. */
typedef struct {
    const char *name, *heading, *help;
    size_t offset;
} sv_counter_line;

#define SV_COUNTER_LINE(name, heading, help)                                                       \
    {#name, heading, help, offsetof(sv_counters, name)},
static const sv_counter_line sv_wait_lines[] = {SV_WAITS(SV_COUNTER_LINE){0}};
static const sv_counter_line sv_work_lines[] = {SV_WORK(SV_COUNTER_LINE){0}};
static const sv_counter_line sv_on_cores_lines[] = {SV_ON_CORES(SV_COUNTER_LINE){0}};

/* The number of a line in its structure. */
static inline _Atomic uint64_t *sv_counter_at(void *structure, const sv_counter_line *line)
{
    return (_Atomic uint64_t *)(void *)((char *)structure + line->offset);
}

/* Stores a counter; only its one writer may call this. */
static inline void sv_counter_set(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static inline uint64_t sv_counter_get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* A counter's process: publishes its counts. */
static inline void sv_counters_publish(sv_counters *counters, const sv_counts *counts)
{
#define SV_PUBLISH(name, heading, help)                                                            \
    sv_counter_set(&counters->name, (uint64_t)counts->name);
    SV_COUNTERS(SV_PUBLISH)
#undef SV_PUBLISH
}

/* Parent: adds the counts of a dead worker to those of its predecessors. */
static inline void sv_counters_add(sv_counters *past, const sv_counters *gone)
{
#define SV_KEEP(name, heading, help)                                                               \
    sv_counter_set(&past->name, sv_counter_get(&past->name) + sv_counter_get(&gone->name));
    SV_COUNTERS(SV_KEEP)
#undef SV_KEEP
}

/* What a worker is doing with an env.  SV_IN_SEVERAL: it is busy with several envs at once, and the
 * envs' own activities (timings.h) say what they do. */
enum sv_doing { SV_IN_STEP, SV_IN_RESET, SV_IN_CALL, SV_IN_SEVERAL };

/* An operation in progress, with its env. */
static inline uint64_t sv_busy(uint32_t env, enum sv_doing doing)
{
    return ((uint64_t)env + 1) << 2 | doing;
}

static inline uint64_t sv_busy_env(uint64_t busy)
{
    return (busy >> 2) - 1;
}

/* The operation. */
static inline enum sv_doing sv_busy_doing(uint64_t busy)
{
    return (enum sv_doing)(busy & 3);
}

static inline const char *sv_busy_name(uint64_t busy)
{
    static const char *const names[] = {"step", "reset", "call", "several"};
    return names[busy & 3];
}

/* The writer: notes that an operation begins, or with `busy` 0 that it ends.  The end does not change
 * `since`, because a reader that has read `busy` before the end may read `since` after it. */
static inline void sv_busy_begin(sv_activity *activity, uint64_t busy, int64_t now)
{
    /* release: pairs with the acquire of sv_busy_for, which must not see this with an older time. */
    if (busy != 0)
        atomic_store_explicit(&activity->since, (uint64_t)now, memory_order_relaxed);
    atomic_store_explicit(&activity->busy, busy, memory_order_release);
}

/* A reader: what is in progress, and for how long; the time is never too long. */
static inline uint64_t sv_busy_for(const sv_activity *activity, int64_t now, int64_t *elapsed)
{
    /* acquire: pairs with the release of sv_busy_begin. */
    uint64_t busy = atomic_load_explicit(&activity->busy, memory_order_acquire);
    uint64_t since = atomic_load_explicit(&activity->since, memory_order_relaxed);
    *elapsed = (int64_t)((uint64_t)now - since); /* unsigned: a damaged one must not overflow */
    return busy;
}

#endif
