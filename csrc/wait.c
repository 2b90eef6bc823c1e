/* wait.c — see wait.h for the policy. */
#include "wait.h"

#define US INT64_C(1000)

/* What a park is thought to cost before the first one was measured, and the bounds within which
 * measurements are believed (a sleeper that was scheduled late says nothing about parking). */
#define PARK_COST_FIRST (40 * US)
#define PARK_COST_MIN (5 * US)
#define PARK_COST_MAX (100 * US)

#define LENGTH_MAX (2000 * US) /* longer waits count as this long */
#define TOKEN_SPIN (1 * US)    /* spun even when it is not expected to help */
#define LEARNING_SHIFT 3       /* moving averages over about 2**3 waits */
#define PAUSES_PER_LOOK 8      /* between two readings of the clock */

void sv_waiter_init(sv_waiter *waiter, sv_budget budget, bool homing)
{
    *waiter = (sv_waiter){.budget = budget, .homing = homing, .park_cost = PARK_COST_FIRST};
}

static int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

static int64_t average(int64_t old, int64_t sample)
{
    return old + ((sample - old) >> LEARNING_SHIFT);
}

/* Begins a phase of the wait in progress, and ends the one before. */
static inline void enter(sv_waiter *waiter, int64_t *phase_ns, int64_t now)
{
    if (waiter->phase_ns != NULL)
        *waiter->phase_ns += now - waiter->phase_since;
    waiter->phase_ns = phase_ns;
    waiter->phase_since = now;
}

/* Ends the wait in progress.  `asked_at` is when the waker called, 0 if nobody had to. */
static void learn(sv_waiter *waiter, int64_t asked_at)
{
    int64_t now = sv_now_ns();
    enter(waiter, NULL, now);
    /* Clipped, so that one long break (an evaluation, a debugger) is soon forgotten. */
    int64_t length = clamp(now - waiter->since, 0, LENGTH_MAX);
    waiter->typical = average(waiter->typical, length);
    if (asked_at > waiter->since && asked_at < now) {
        waiter->late_wakes += now - asked_at > PARK_COST_MAX;
        waiter->park_cost = average(waiter->park_cost,
                                    clamp(now - asked_at, PARK_COST_MIN, PARK_COST_MAX));
    }
    waiter->since = 0;
}

/* How long to spin in a phase that may last `most`. */
static int64_t worthwhile(const sv_waiter *waiter, int64_t most)
{
    bool too_long = waiter->typical > most + waiter->park_cost;
    return too_long && most > TOKEN_SPIN ? TOKEN_SPIN : most;
}

/* What is waited for: > 0 ready, 0 not yet, < 0 corrupt. */
typedef int (*sv_ready)(void *what);

/* The pause and yield phases. */
static inline int spin(sv_waiter *waiter, sv_ready ready, void *what)
{
    int found;
    waiter->waits++;
    waiter->since = sv_now_ns();
    int64_t pause_until = waiter->since + worthwhile(waiter, waiter->budget.pause);
    int64_t yield_until = pause_until + worthwhile(waiter, waiter->budget.yield);
    int64_t now = waiter->since;
    enter(waiter, &waiter->pause_ns, now);
    while (now < pause_until) {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            sv_pause();
            if ((found = ready(what)) != 0)
                return found;
        }
        now = sv_now_ns();
    }
    enter(waiter, &waiter->yield_ns, now);
    while (now < yield_until) {
        sv_yield();
        if ((found = ready(what)) != 0)
            return found;
        now = sv_now_ns();
    }
    enter(waiter, &waiter->park_ns, now);
    return 0;
}

static int request_ready(void *what)
{
    return sv_ring_peek(what);
}

int sv_wait_request(sv_waiter *waiter, sv_bell *bell, sv_ring *requests, uint32_t index,
                    int64_t slice_ns)
{
    int found = sv_ring_peek(requests);
    if (found != 0 && waiter->since == 0)
        return found;
    int64_t asked_at = 0;
    if (found == 0 && waiter->since == 0)
        found = spin(waiter, request_ready, requests);
    if (found == 0) {
        uint32_t ticket = sv_bell_listen(bell);
        found = sv_ring_peek(requests); /* between listen and sleep: see bell.h */
        if (found == 0) {
            sv_affinity affinity = {.count = 0};
            waiter->parks++;
            if (waiter->homing)
                sv_affinity_narrow(&affinity, index);
            sv_bell_sleep(bell, ticket, sv_bell_mask(index), slice_ns);
            if (waiter->homing)
                sv_affinity_widen(&affinity);
            found = sv_ring_peek(requests);
            if (found == 0)
                return SV_WAIT_SLICE;
            /* relaxed: only a measurement. */
            asked_at = atomic_load_explicit(&bell->rung_at, memory_order_relaxed);
        }
    }
    learn(waiter, asked_at);
    return found;
}

struct completion_wait {
    sv_completion *completion;
    uint32_t target;
};

static int completion_ready(void *what)
{
    const struct completion_wait *wait = what;
    return sv_completion_check(wait->completion, wait->target);
}

/* Sleeps until `target` requests are done.  False: the slice is over first. */
static bool park_for(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                     int64_t slice_ns, int64_t *asked_at)
{
    if (!sv_completion_arm(completion, target))
        return true;
    waiter->parks++;
    sv_completion_sleep(completion, target, slice_ns);
    /* relaxed: only a measurement. */
    *asked_at = atomic_load_explicit(&completion->woken_at, memory_order_relaxed);
    return sv_completion_check(completion, target);
}

int sv_wait_completion(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                       int64_t slice_ns)
{
    struct completion_wait wait = {completion, target};
    bool found = sv_completion_check(completion, target);
    if (found && waiter->since == 0)
        return SV_WAIT_READY;
    int64_t asked_at = 0;
    if (!found && waiter->since == 0) {
        found = spin(waiter, completion_ready, &wait);
        waiter->early = waiter->budget.linger > 0;
    }
    if (!found && waiter->early) {
        if (!park_for(waiter, completion, target - 1, slice_ns, &asked_at))
            return SV_WAIT_SLICE;
        waiter->early = false;
        int64_t now = sv_now_ns(), until = now + waiter->budget.linger;
        enter(waiter, &waiter->yield_ns, now);
        while (!(found = sv_completion_check(completion, target)) && now < until) {
            sv_yield();
            now = sv_now_ns();
        }
        enter(waiter, &waiter->park_ns, now);
    }
    if (!found && !park_for(waiter, completion, target, slice_ns, &asked_at))
        return SV_WAIT_SLICE;
    learn(waiter, asked_at);
    return SV_WAIT_READY;
}
