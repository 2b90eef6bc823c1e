/* wait.c — see wait.h for the policy. */
#include "wait.h"

#include "affinity.h"

#define US INT64_C(1000)

/* The assumed cost of a park before the first one was measured, and bounds for measurements: a
 * sleeper that was scheduled late says nothing about parking. */
#define PARK_COST_FIRST (40 * US)
#define PARK_COST_MIN (5 * US)
#define PARK_COST_MAX (100 * US)

#define LENGTH_MAX (2000 * US) /* longer waits count as this long */
#define TOKEN_SPIN (1 * US)    /* spun even when it is not expected to help */
#define LEARNING_SHIFT 3       /* moving averages over about 2**3 waits */
#define YIELD_COST_MAX (200 * US) /* a yield that cost more counts as this much */
#define PROBE_FIRST 64            /* waits until yields that cost too much are tried again */
#define PROBE_MAX 8192
#define EXPECTED_MAX (40000 * US) /* less than a slice; ends of longer waits are not predicted */
#define WAKE_MARGIN (100 * US) /* how late timers are: their slack, and waking up */
#define BUDGET_MAX (50000 * US) /* the most that a policy may ask for */
#define HANDOVERS_ONE 1024 /* waiter->handovers if every wait ends because of one */
#define MIN_SWITCH (1 * US)    /* a yield that took longer gave the core to another thread */
#define YIELD_INTERVAL (10 * US) /* time between two yields while pausing */
#define PAUSES_PER_CHECK 8      /* between two readings of the clock */

void sv_waiter_init(sv_waiter *waiter, sv_budget budget, bool homing, sv_counts *counts)
{
    *waiter = (sv_waiter){.budget = budget,
                          .answers_left = -1,
                          .homing = homing,
                          .park_cost = PARK_COST_FIRST,
                          .counts = counts};
}

void sv_waiter_follow(sv_waiter *waiter, const sv_policy *policy, sv_counts *counts)
{
    sv_waiter_init(waiter, (sv_budget){0}, false, counts);
    waiter->policy = policy;
}

void sv_policy_set(sv_policy *policy, sv_budget budget, bool homing, uint32_t cores)
{
    /* relaxed: see sv_policy. */
    atomic_store_explicit(&policy->pause, budget.pause, memory_order_relaxed);
    atomic_store_explicit(&policy->yield, budget.yield, memory_order_relaxed);
    atomic_store_explicit(&policy->linger, budget.linger, memory_order_relaxed);
    atomic_store_explicit(&policy->window, budget.window, memory_order_relaxed);
    atomic_store_explicit(&policy->cores, cores, memory_order_relaxed);
    atomic_store_explicit(&policy->homing, homing, memory_order_relaxed);
}

static int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* Copies the budget that the policy has now. */
static void load_budget(sv_waiter *waiter)
{
    const sv_policy *policy = waiter->policy;
    if (policy == NULL)
        return;
    /* relaxed: see sv_policy.  Clamped, since a damaged segment may hold anything. */
    int64_t pause = atomic_load_explicit(&policy->pause, memory_order_relaxed);
    int64_t yield = atomic_load_explicit(&policy->yield, memory_order_relaxed);
    int64_t linger = atomic_load_explicit(&policy->linger, memory_order_relaxed);
    int64_t window = atomic_load_explicit(&policy->window, memory_order_relaxed);
    waiter->budget.pause = clamp(pause, 0, BUDGET_MAX);
    waiter->budget.window = clamp(window, 0, BUDGET_MAX);
    waiter->budget.yield = clamp(yield, 0, BUDGET_MAX);
    waiter->budget.linger = clamp(linger, 0, BUDGET_MAX);
    waiter->cores = atomic_load_explicit(&policy->cores, memory_order_relaxed);
    if (waiter->budget.linger > 0 && waiter->answers_left >= 0)
        waiter->budget.yield = waiter->answers_left < waiter->cores ? waiter->budget.linger : 0;
    waiter->homing = atomic_load_explicit(&policy->homing, memory_order_relaxed) != 0;
}

static int64_t average(int64_t old, int64_t sample)
{
    return old + ((sample - old) >> LEARNING_SHIFT);
}

/* Updates the mean length of the waits, and their mean deviation from it. */
static void learn_length(sv_waiter *waiter, int64_t length)
{
    int64_t off = length - waiter->expected;
    waiter->deviation = average(waiter->deviation, off < 0 ? -off : off);
    waiter->expected = average(waiter->expected, length);
}

/* The kind of a phase in a trace. */
static uint32_t trace_kind_of(const sv_waiter *waiter, const int64_t *phase_ns)
{
    return phase_ns == NULL                          ? waiter->trace->idle_kind
           : phase_ns == &waiter->counts->pause_ns ? SV_TRACE_PAUSE
           : phase_ns == &waiter->counts->yield_ns ? SV_TRACE_YIELD
                                                   : SV_TRACE_PARK;
}

/* Begins a phase of the wait in progress, and ends the one before. */
static inline void enter_phase(sv_waiter *waiter, int64_t *phase_ns, int64_t now)
{
    if (waiter->trace != NULL)
        sv_trace_enter(waiter->trace, trace_kind_of(waiter, phase_ns), now);
    if (waiter->phase_ns != NULL)
        *waiter->phase_ns += now - waiter->phase_since;
    waiter->phase_ns = phase_ns;
    waiter->phase_since = now;
}

void sv_waiter_learn_yield(sv_waiter *waiter, int64_t cost)
{
    int64_t most = 2 * waiter->park_cost;
    if (waiter->probe_in == 1 && cost <= most) { /* the probe was cheap: yields are fine from now on */
        waiter->yield_cost = cost;
        waiter->probe_in = waiter->probe_every = 0;
        return;
    }
    waiter->yield_cost = average(waiter->yield_cost, clamp(cost, 0, YIELD_COST_MAX));
    if (waiter->yield_cost > most) {
        waiter->probe_every = waiter->probe_every == 0 ? PROBE_FIRST
                              : waiter->probe_every < PROBE_MAX ? 2 * waiter->probe_every
                                                                 : PROBE_MAX;
        waiter->probe_in = waiter->probe_every;
    }
}

bool sv_waiter_may_yield(sv_waiter *waiter)
{
    if (waiter->probe_in > 1)
        waiter->probe_in--;
    return waiter->probe_in <= 1;
}

/* Ends the wait in progress.  `asked_at` is when the other side called, if that is known. */
static void end_wait(sv_waiter *waiter, int64_t asked_at)
{
    int64_t now = sv_now_ns();
    int64_t *phase_ns = waiter->phase_ns;
    enter_phase(waiter, NULL, now);
    /* Clipped, so that one long break (an evaluation, a debugger) has little effect. */
    int64_t length = clamp(now - waiter->since, 0, LENGTH_MAX);
    waiter->typical = average(waiter->typical, length);
    learn_length(waiter, clamp(now - waiter->since, 0, EXPECTED_MAX));
    if (asked_at > waiter->since && asked_at < now) {
        int64_t cost = now - asked_at;
        if (phase_ns == &waiter->counts->yield_ns) {
            sv_waiter_learn_yield(waiter, cost);
        } else if (phase_ns == &waiter->counts->park_ns) {
            waiter->counts->late_wakes += cost > PARK_COST_MAX;
            waiter->park_cost =
                average(waiter->park_cost, clamp(cost, PARK_COST_MIN, PARK_COST_MAX));
        }
    }
    waiter->since = 0;
    waiter->ended_at = now;
}

/* How long to spin in a phase that may last `most`. */
static int64_t spin_ns(const sv_waiter *waiter, int64_t most)
{
    bool too_long = waiter->typical > most + waiter->park_cost;
    return too_long && most > TOKEN_SPIN ? TOKEN_SPIN : most;
}

/* Whether the wait is over: > 0 ready, 0 not yet, < 0 corrupt. */
typedef int (*sv_ready)(void *what);

/* Updates how often waits end because this core was given to another thread. */
static void learn_handover(sv_waiter *waiter, bool shared)
{
    waiter->handovers = average(waiter->handovers, shared ? HANDOVERS_ONE : 0);
}

/* Yields once, and looks. */
static inline int yield_once(sv_waiter *waiter, sv_ready ready, void *what, int64_t *now)
{
    int64_t before = *now;
    sv_yield();
    int found = ready(what);
    *now = sv_now_ns();
    if (found != 0)
        learn_handover(waiter, *now - before > MIN_SWITCH);
    return found;
}

/* The yield phase, from now on. */
static inline int yield_until(sv_waiter *waiter, sv_ready ready, void *what, int64_t now,
                              int64_t until)
{
    int found;
    enter_phase(waiter, &waiter->counts->yield_ns, now);
    while (now < until)
        if ((found = yield_once(waiter, ready, what, &now)) != 0)
            return found;
    enter_phase(waiter, &waiter->counts->park_ns, now);
    return 0;
}

/* The pause and yield phases, from now on. */
static inline int spin(sv_waiter *waiter, sv_ready ready, void *what, int64_t now)
{
    int found;
    waiter->counts->waits++;
    waiter->since = now;
    bool probe = waiter->counts->waits % PROBE_FIRST == 0;
    bool gives_core_away = waiter->handovers > HANDOVERS_ONE / 2 && !probe;
    int64_t pause = gives_core_away ? 0 : spin_ns(waiter, waiter->budget.pause);
    int64_t yield = spin_ns(waiter, waiter->budget.yield);
    bool may_yield = yield > 0 && sv_waiter_may_yield(waiter);
    int64_t pause_until = now + pause;
    int64_t yield_at = now + YIELD_INTERVAL;
    enter_phase(waiter, &waiter->counts->pause_ns, now);
    while (now < pause_until) {
        for (int i = 0; i < PAUSES_PER_CHECK; i++) {
            sv_pause();
            if ((found = ready(what)) != 0) {
                learn_handover(waiter, false);
                return found;
            }
        }
        now = sv_now_ns();
        if (may_yield && now >= yield_at) {
            if ((found = yield_once(waiter, ready, what, &now)) != 0)
                return found;
            yield_at = now + YIELD_INTERVAL;
        }
    }
    return yield_until(waiter, ready, what, now, may_yield ? now + yield : now);
}

/* When to wake up for a wait whose end can be predicted, or 0; `until`: when to give up. */
static int64_t wake_time(const sv_waiter *waiter, int64_t *until)
{
    int64_t half = 2 * waiter->deviation + WAKE_MARGIN;
    if (2 * half > waiter->budget.window || waiter->expected < 3 * half || waiter->probe_in > 1)
        return 0;
    *until = waiter->since + waiter->expected + half;
    return *until - 2 * half;
}

/* Sleeps until a moment, or until what is waited for is ready: as sv_ready. */
typedef int (*sv_sleep)(sv_waiter *waiter, void *what, int64_t until);

/* If the end of the wait that has just begun can be predicted: sleeps, and yields around it. */
static inline int sleep_until_expected(sv_waiter *waiter, sv_ready ready, sv_sleep sleep,
                                       void *what, int64_t end)
{
    int64_t until, wake_at = wake_time(waiter, &until);
    if (wake_at == 0 || wake_at >= end)
        return 0;
    int found = sleep(waiter, what, wake_at);
    if (found == 0)
        found = yield_until(waiter, ready, what, sv_now_ns(), until < end ? until : end);
    return found;
}

struct request_wait {
    sv_bell *bell;
    sv_ring *requests;
    uint32_t index;
};

static int request_ready(void *what)
{
    const struct request_wait *wait = what;
    return sv_ring_peek(wait->requests);
}

static int sleep_for_request(sv_waiter *waiter, void *what, int64_t until)
{
    const struct request_wait *wait = what;
    uint32_t ticket = sv_bell_listen(wait->bell);
    SV_FAULT(10);
    int found = sv_ring_peek(wait->requests); /* between listen and sleep: see bell.h */
    int64_t timeout_ns = until - sv_now_ns();
    if (found != 0 || timeout_ns <= 0)
        return found;
    sv_affinity affinity = {.count = 0};
    waiter->counts->parks++;
    bool homing = waiter->homing && waiter->probe_in <= 1;
    if (homing)
        sv_affinity_narrow(&affinity, wait->index);
    sv_bell_sleep(wait->bell, ticket, sv_bell_mask(wait->index), timeout_ns);
    if (homing)
        sv_affinity_widen(&affinity);
    SV_FAULT(11);
    return sv_ring_peek(wait->requests);
}

int sv_wait_request(sv_waiter *waiter, sv_bell *bell, sv_ring *requests, uint32_t index,
                    int64_t slice_ns)
{
    struct request_wait wait = {bell, requests, index};
    int found = sv_ring_peek(requests);
    if (found != 0 && waiter->since == 0)
        return found;
    int64_t now = sv_now_ns();
    int64_t end = now + slice_ns;
    if (found == 0 && waiter->since == 0) {
        load_budget(waiter);
        found = spin(waiter, request_ready, &wait, now);
        if (found == 0)
            found = sleep_until_expected(waiter, request_ready, sleep_for_request, &wait, end);
    }
    if (found == 0)
        found = sleep_for_request(waiter, &wait, end);
    if (found == 0)
        return SV_WAIT_SLICE;
    /* relaxed: only a measurement. */
    end_wait(waiter, atomic_load_explicit(&bell->rung_at, memory_order_relaxed));
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

static int sleep_for_completion(sv_waiter *waiter, void *what, int64_t until)
{
    const struct completion_wait *wait = what;
    int64_t timeout_ns = until - sv_now_ns();
    if (timeout_ns <= 0 || !sv_completion_arm(wait->completion, wait->target))
        return completion_ready(what);
    waiter->counts->parks++;
    sv_completion_sleep(wait->completion, wait->target, timeout_ns);
    return completion_ready(what);
}

int sv_wait_completion(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                       int64_t slice_ns)
{
    struct completion_wait wait = {completion, target};
    struct completion_wait all_but_one = {completion, target - 1};
    int found = completion_ready(&wait);
    if (found && waiter->since == 0)
        return SV_WAIT_READY;
    int64_t now = sv_now_ns();
    int64_t end = now + slice_ns;
    if (!found && waiter->since == 0) {
        found = spin(waiter, completion_ready, &wait, now);
        waiter->waits_early = waiter->budget.linger > 0 && waiter->probe_in <= 1;
        if (!found && !waiter->waits_early)
            found = sleep_until_expected(waiter, completion_ready, sleep_for_completion, &wait, end);
    }
    if (!found && waiter->waits_early) {
        if (!sleep_for_completion(waiter, &all_but_one, end))
            return SV_WAIT_SLICE;
        waiter->waits_early = false;
        now = sv_now_ns();
        found = completion_ready(&wait);
        if (!found)
            found = yield_until(waiter, completion_ready, &wait, now, now + waiter->budget.linger);
    }
    if (!found && !sleep_for_completion(waiter, &wait, end))
        return SV_WAIT_SLICE;
    /* relaxed: only a measurement. */
    end_wait(waiter, atomic_load_explicit(&completion->done_at, memory_order_relaxed));
    return SV_WAIT_READY;
}
