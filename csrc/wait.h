/* wait.h — how long to pause, when to yield, when to park.
 *
 * A cache line travels between two cores in 0.1 µs; waking a sleeping process takes 5 to 40 µs.
 * So spinning is two orders cheaper than sleeping while a core is free, and ruinous (a scheduler
 * time slice, milliseconds) once more processes spin than there are cores.  A wait therefore goes
 * through three phases:
 *
 *     pause   spin on the core's pause instruction.  Only with a core to spare: the caller sets
 *             pause_cap to 0 unless fewer participants can run than there are usable cores.
 *     yield   spin on sched_yield: whoever else wants this core gets it at once, so it is safe
 *             with every core taken; each turn costs 0.5 µs.
 *     park    sleep on a futex, in slices, so that the caller can look after signals, deadlines
 *             and dead peers between them.
 *
 * Budgets are in time.  Each waiter learns two numbers:
 *
 *     park_cost  what a park costs, from the waker's clock reading to the sleeper's.  It limits
 *                the spin: one that ends in a park has then cost at most twice the better choice.
 *                A waiter with a core of its own may be patient: it pauses up to `patience` park
 *                costs, for there the spin costs nobody anything and the park costs a batch step.
 *     typical    how long its waits last (moving average).  Waits that are typically longer than
 *                the limit are not worth spinning for: only a token spin is made.  The length of
 *                a wait that ended in a park includes that park, so one park cost is allowed on
 *                top: else a waiter that once began to park would never stop.
 *
 * Every wait teaches, spun or parked, so the budget follows when the other side changes its pace.
 * A waiter is private to its process; nothing of it is shared.
 */
#ifndef SHMVEC_WAIT_H
#define SHMVEC_WAIT_H

#include "bell.h"
#include "completion.h"
#include "ring.h"

enum {
    SV_WAIT_READY = 1,       /* what was waited for is there */
    SV_WAIT_SLICE = 0,       /* the slice is over: look around, then call again */
    SV_WAIT_CORRUPT = -1,    /* the segment holds nonsense */
};

typedef struct {
    int64_t pause_cap; /* ns; 0: never pause */
    int64_t yield_cap; /* ns; 0: never yield */
    int64_t patience;  /* how many park costs a pause may last; at least 1 */
    int64_t typical;   /* ns; learned */
    int64_t park_cost; /* ns; learned */
    int64_t since;     /* start of the wait in progress; 0: none */
    uint64_t waits;    /* waits that did not find everything ready at once */
    uint64_t parks;    /* of these, the ones that slept */
} sv_waiter;

/* `pause_cap` and `yield_cap` in ns; 0 leaves a phase out.  Both 0: park at once. */
void sv_waiter_init(sv_waiter *waiter, int64_t pause_cap, int64_t yield_cap, int64_t patience);

/* Worker: waits until its request ring has a record, at most about slice_ns.  `index` is the
 * worker's, for its bit of the bell.  Call again after SV_WAIT_SLICE: the wait goes on parked. */
int sv_wait_request(sv_waiter *waiter, sv_bell *bell, sv_ring *requests, uint32_t index,
                    int64_t slice_ns);

/* Parent: waits until `target` requests are done, at most about slice_ns. */
int sv_wait_completion(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                       int64_t slice_ns);

#endif
