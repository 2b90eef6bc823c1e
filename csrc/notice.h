/* notice.h — what the parent makes known of its vector env, for whoever looks on: python -m shmvec top.
 *
 * What the workers do is in their counters and in the histograms of their envs.  The rest only the
 * parent knows: whether it waits, and for how long; how many faults there were; whose the segment is
 * and whether the vector env is still in use.  It writes that here, on lines of its own, and is the
 * only writer; onlookers have mapped the segment, or read its file, and write nothing.
 *
 * As counters do, the numbers carry no data: a reader may see one newer than another, never half of
 * one.  All accesses but those of `state` are relaxed.
 */
#ifndef SHMVEC_NOTICE_H
#define SHMVEC_NOTICE_H

#include "counters.h"

#define SV_FAULT_COUNTS(X)                                                                         \
    X(crashes)  /* workers that died */                                                            \
    X(errors)   /* exceptions in envs */                                                           \
    X(timeouts) /* steps and resets that took too long */                                          \
    X(restarts) /* workers started in place of others */                                           \
    X(resets)   /* envs that were reset for it */

enum { SV_NOTICE_NOT_YET = 0, SV_NOTICE_OPEN = 1, SV_NOTICE_CLOSED = 2 };

typedef struct {
    sv_counters parent; /* its waits, and since when it is in one */
    alignas(SV_CACHE_LINE) _Atomic uint64_t state;
    _Atomic uint64_t began;       /* when it was ready for use: sv_now_ns */
    _Atomic uint64_t num_workers; /* processes; 0: the envs live in the parent */
    _Atomic uint64_t cores;       /* that the parent and its workers may use */
    _Atomic uint64_t number;      /* which of its process's it is: the first has 1 */
#define SV_NOTICE_FAULT(name) _Atomic uint64_t name;
    SV_FAULT_COUNTS(SV_NOTICE_FAULT)
#undef SV_NOTICE_FAULT
} sv_notice;

_Static_assert(sizeof(sv_notice) % SV_CACHE_LINE == 0, "lines of its own");

/* Where each of them is in an sv_notice. */
static const struct sv_fault_name {
    const char *name;
    size_t offset;
} sv_fault_names[] = {
#define SV_FAULT_NAME(name) {#name, offsetof(sv_notice, name)},
    SV_FAULT_COUNTS(SV_FAULT_NAME)
#undef SV_FAULT_NAME
};

#define SV_NUM_FAULTS (sizeof sv_fault_names / sizeof *sv_fault_names)

/* Precondition: which < SV_NUM_FAULTS. */
static inline _Atomic uint64_t *sv_notice_fault(sv_notice *notice, size_t which)
{
    return (_Atomic uint64_t *)(void *)((char *)notice + sv_fault_names[which].offset);
}

/* Parent: the vector env is ready for use. */
static inline void sv_notice_open(sv_notice *notice, uint64_t process, uint64_t num_workers)
{
    sv_counter_set(&notice->parent.process, process);
    sv_counter_set(&notice->num_workers, num_workers);
    sv_counter_set(&notice->began, (uint64_t)sv_now_ns());
    /* release: pairs with the acquire of sv_notice_state: who sees it open sees whose it is. */
    atomic_store_explicit(&notice->state, SV_NOTICE_OPEN, memory_order_release);
}

/* Parent: nobody uses it any more; the memory may live on, under arrays of the user's. */
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

/* Parent: it waits from now on. */
static inline void sv_notice_wait(sv_notice *notice, int64_t now)
{
    sv_busy_begin(&notice->parent, 1, now);
}

/* Parent: it waits no more. */
static inline void sv_notice_go_on(sv_notice *notice)
{
    sv_busy_begin(&notice->parent, 0, 0);
}

#endif
