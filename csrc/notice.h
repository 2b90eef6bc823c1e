/* notice.h — what the parent publishes about its vector env, for onlookers: python -m shmvec top.
 *
 * The counters and histograms show what the workers do.  Only the parent knows the rest: whether it
 * waits, and for how long; how many faults there were; which process owns the
 * segment, and whether the vector env is still in use.  The parent writes that here, on cache lines of
 * its own, and is the only writer; onlookers map the segment, or read its file, and write nothing.
 *
 * As counters do, the numbers carry no data: a reader may see one newer than another, never half of
 * one.  All accesses but those of `state` are relaxed.
 */
#ifndef SHMVEC_NOTICE_H
#define SHMVEC_NOTICE_H

#include "counters.h"

enum { SV_NOTICE_NOT_YET = 0, SV_NOTICE_OPEN = 1, SV_NOTICE_CLOSED = 2 };

typedef struct {
    sv_counters parent; /* the parent's waits, and when the present one began */
    alignas(SV_CACHE_LINE) _Atomic uint64_t state;
    _Atomic uint64_t began;       /* when it was ready for use: sv_now_ns */
    _Atomic uint64_t num_processes; /* workers that are processes: all, or all but the last */
    _Atomic uint64_t cores;       /* number of cores that the parent and its workers may use */
    _Atomic uint64_t number;      /* its number among the process's vector envs, from 1 */
    _Atomic uint64_t options;     /* a bit for each option that stats.py may advise, and that is set */
    SV_FAULTS(SV_COUNTER)
} sv_notice;

_Static_assert(sizeof(sv_notice) % SV_CACHE_LINE == 0, "lines of its own");

#define SV_FAULT_LINE(name, heading, help) {#name, heading, help, offsetof(sv_notice, name)},
static const sv_counter_line sv_fault_lines[] = {SV_FAULTS(SV_FAULT_LINE){0}};

/* Parent: the vector env is ready for use. */
static inline void sv_notice_open(sv_notice *notice, uint64_t process, uint64_t num_processes)
{
    sv_counter_set(&notice->parent.process, process);
    sv_counter_set(&notice->num_processes, num_processes);
    sv_counter_set(&notice->began, (uint64_t)sv_now_ns());
    /* release: pairs with the acquire of sv_notice_state: a reader that sees it open sees its owner. */
    atomic_store_explicit(&notice->state, SV_NOTICE_OPEN, memory_order_release);
}

/* Parent: the vector env is closed; the memory may live on, under arrays of the user's. */
static inline void sv_notice_close(sv_notice *notice)
{
    /* release: as sv_notice_open, though nothing is read after it. */
    atomic_store_explicit(&notice->state, SV_NOTICE_CLOSED, memory_order_release);
}

static inline uint64_t sv_notice_state(const sv_notice *notice)
{
    /* acquire: pairs with the release of sv_notice_open. */
    return atomic_load_explicit(&notice->state, memory_order_acquire);
}

/* Parent: notes that a wait begins. */
static inline void sv_notice_begin_wait(sv_notice *notice, int64_t now)
{
    sv_busy_begin(&notice->parent.activity, 1, now);
}

/* Parent: notes that the wait is over. */
static inline void sv_notice_end_wait(sv_notice *notice)
{
    sv_busy_begin(&notice->parent.activity, 0, 0);
}

#endif
