/* test_wait.c — a whole round trip, request and completion, at every mix of budgets; learning. */
#include "wait.h"
#include "check.h"

#define CAPACITY 64
#define WORKERS 3
#define MS INT64_C(1000000)
#define SLICE (50 * MS)

struct shared {
    sv_bell bell;
    sv_completion completion;
    alignas(SV_CACHE_LINE) char requests[WORKERS][4096];
    uint32_t rounds;
    sv_budget budget;
    bool homing;
};

_Static_assert(sizeof(sv_ring_shared) + CAPACITY * sizeof(sv_slot) <= 4096, "fits");

struct worker {
    struct shared *shared;
    uint32_t index;
};

static void serve(void *argument)
{
    struct worker *worker = argument;
    struct shared *shared = worker->shared;
    sv_ring requests;
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_ring_attach_consumer(&requests, shared->requests[worker->index], CAPACITY);
    sv_waiter_init(&waiter, shared->budget, shared->homing, &counts);
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        int found;
        int64_t start = sv_now_ns();
        while ((found = sv_wait_request(&waiter, &shared->bell, &requests, worker->index,
                                        SLICE)) == SV_WAIT_SLICE)
            CHECK(sv_now_ns() - start < 20 * SV_NS_PER_S);
        CHECK(found == SV_WAIT_READY);
        sv_record record;
        CHECK(sv_ring_try_pop(&requests, &record) == SV_RING_YES && record.sequence == round);
        sv_completion_add(&shared->completion);
    }
}

static void test_rounds(bool processes, uint32_t num_workers, sv_budget budget,
                        uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    struct worker workers[WORKERS];
    runner runners[WORKERS];
    sv_ring requests[WORKERS];
    sv_waiter waiter;
    sv_counts counts = {0};
    shared->rounds = rounds;
    shared->budget = budget;
    shared->homing = budget.yield == 0; /* with the budgets that park most */
    sv_waiter_init(&waiter, budget, false, &counts);
    for (uint32_t i = 0; i < num_workers; i++) {
        sv_ring_attach_producer(&requests[i], shared->requests[i], CAPACITY);
        workers[i] = (struct worker){shared, i};
        run(&runners[i], processes, serve, &workers[i]);
    }
    for (uint32_t round = 1; round <= rounds; round++) {
        sv_record record = {.sequence = round};
        for (uint32_t i = 0; i < num_workers; i++)
            CHECK(sv_ring_try_push(&requests[i], &record) == SV_RING_YES);
        sv_bell_ring(&shared->bell, SV_EVERYONE);
        int64_t start = sv_now_ns();
        /* A wake that was lost is found by the next slice, so count slices, not only time:
         * none may be lost where nobody else takes the cores for a whole slice. */
        while (sv_wait_completion(&waiter, &shared->completion, round * num_workers, SLICE) ==
               SV_WAIT_SLICE)
            CHECK(sv_now_ns() - start < 20 * SV_NS_PER_S);
    }
    for (uint32_t i = 0; i < num_workers; i++)
        join(&runners[i]);
    CHECK(counts.parks <= 2 * counts.waits + 20);
    munmap(shared, sizeof *shared);
}

static void test_learning(void)
{
    sv_completion completion = {0};
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_waiter_init(&waiter, (sv_budget){50000, 0, 0, 0}, false, &counts);
    CHECK(waiter.typical == 0);
    /* Waits that time out do not teach; the one that ends does, and long waits end the spinning. */
    for (uint32_t target = 1; target <= 40; target++) {
        CHECK(sv_wait_completion(&waiter, &completion, target, MS) == SV_WAIT_SLICE);
        CHECK(waiter.since != 0);
        sv_completion_add(&completion);
        CHECK(sv_wait_completion(&waiter, &completion, target, MS) == SV_WAIT_READY);
        CHECK(waiter.since == 0);
    }
    CHECK(waiter.typical > 50000 + waiter.park_cost);
    /* Each slice ends in a park, unless a busy machine has it pass while it spins. */
    CHECK(counts.waits == 40 && counts.parks > 0 && counts.parks <= 40);
    /* Every moment of a wait belongs to one phase, and none of it to a phase without a budget. */
    CHECK(counts.pause_ns > 0 && counts.yield_ns == 0);
    CHECK(counts.pause_ns + counts.park_ns >= 39 * MS);
    CHECK(waiter.phase_ns == NULL && counts.late_wakes <= counts.parks);
    /* What is ready at once costs no wait. */
    CHECK(sv_wait_completion(&waiter, &completion, 40, MS) == SV_WAIT_READY);
    CHECK(counts.waits == 40);
}

/* A worker that follows a policy, and the parent's end of its ring. */
static struct {
    sv_policy policy;
    sv_bell bell;
    alignas(SV_CACHE_LINE) char memory[4096];
    sv_ring sent, received;
    sv_waiter waiter;
    sv_counts counts;
} following;

static void start_following(void)
{
    memset(&following, 0, sizeof following);
    CHECK(sv_ring_bytes(64) <= sizeof following.memory);
    sv_ring_attach_producer(&following.sent, following.memory, 64);
    sv_ring_attach_consumer(&following.received, following.memory, 64);
    sv_waiter_follow(&following.waiter, &following.policy, &following.counts);
}

static int wait_for(int64_t slice)
{
    return sv_wait_request(&following.waiter, &following.bell, &following.received, 0, slice);
}

/* A request that is there already: the wait is over at once. */
static void receive_one(void)
{
    sv_record record = {0};
    CHECK(sv_ring_try_push(&following.sent, &record) == SV_RING_YES);
    CHECK(wait_for(MS) == SV_WAIT_READY);
    CHECK(sv_ring_try_pop(&following.received, &record) == SV_RING_YES);
}

/* Else it would learn not to spin, and on a busy machine not to yield. */
static void forget(void)
{
    following.waiter.typical = 0;
    following.waiter.yield_cost = 0;
    following.waiter.probe_in = following.waiter.probe_every = 0;
}

/* A worker's waits follow the policy from one wait to the next, whatever it says. */
static void test_policy(void)
{
    sv_waiter *waiter = &following.waiter;
    const sv_counts *counts = &following.counts;
    start_following();
    const struct {
        sv_budget budget;
        bool pauses, yields;
    } cases[] = {
        {{0, 0, 0, 0}, false, false},
        {{MS, 0, 0, 0}, true, false},
        {{0, MS, 0, 0}, false, true},
        {{-MS, INT64_MIN, 0, 0}, false, false},
        {{0, 0, 0, 0}, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t pause_ns = counts->pause_ns, yield_ns = counts->yield_ns;
        sv_policy_set(&following.policy, cases[i].budget, false, 0);
        CHECK(wait_for(MS) == SV_WAIT_SLICE);
        receive_one();
        /* Phases without a budget end when they begin: a clock reading apart at most. */
        CHECK((counts->pause_ns - pause_ns >= MS) == cases[i].pauses);
        CHECK((counts->yield_ns - yield_ns >= MS) == cases[i].yields);
        forget();
    }
    sv_policy_set(&following.policy, (sv_budget){INT64_MAX, INT64_MAX, 0, 0}, true, 0);
    CHECK(wait_for(MS) == SV_WAIT_SLICE);
    CHECK(waiter->budget.pause + waiter->budget.yield < 1000 * MS && waiter->homing);
    memset((void *)&following.policy, 0x5a, sizeof following.policy); /* damaged */
    receive_one();
    CHECK(wait_for(MS) == SV_WAIT_SLICE);
    CHECK(waiter->budget.pause + waiter->budget.yield < 1000 * MS && waiter->homing);
}

/* With more workers than cores the last of a batch step yield, and others not at all; who was in no
 * such step does as always. */
static void test_who_stays_awake(void)
{
    sv_waiter *waiter = &following.waiter;
    const sv_counts *counts = &following.counts;
    const struct {
        int64_t yield, linger;
        uint32_t cores;
        int64_t left;
        bool yields;
    } cases[] = {
        {0, MS, 2, 0, true},   {0, MS, 2, 1, true},           {0, MS, 2, 2, false},
        {MS, MS, 2, 2, false}, {MS, MS, 2, UINT32_MAX, false}, {MS, MS, 2, -1, true},
        {0, MS, 2, -1, false}, {MS, 0, 2, 2, true},           {0, 0, 2, 0, false},
    };
    start_following();
    CHECK(waiter->answers_left == -1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t yield_ns = counts->yield_ns;
        sv_policy_set(&following.policy, (sv_budget){0, cases[i].yield, cases[i].linger, 0}, false,
                      cases[i].cores);
        waiter->answers_left = cases[i].left;
        forget();
        CHECK(wait_for(2 * MS) == SV_WAIT_SLICE);
        CHECK((counts->yield_ns - yield_ns >= MS) == cases[i].yields);
        receive_one();
    }
}

/* A wait of 10 ms that nothing ends, then one that is over at once.  Returns whether the machine let
 * it sleep all the time: who loses the core on the way to its bed sleeps less, in fewer parts. */
static bool wait_as_foreseen(int64_t expected, int64_t deviation, int64_t window, int64_t parks)
{
    sv_completion completion = {0};
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_waiter_init(&waiter, (sv_budget){0, 0, 0, window}, false, &counts);
    waiter.expected = expected;
    waiter.deviation = deviation;
    CHECK(sv_wait_completion(&waiter, &completion, 1, 10 * MS) == SV_WAIT_SLICE);
    bool undisturbed = counts.parks == parks;
    sv_completion_add(&completion);
    CHECK(sv_wait_completion(&waiter, &completion, 1, 10 * MS) == SV_WAIT_READY);
    CHECK(waiter.expected > expected); /* this one took longer */
    CHECK(waiter.deviation > 0);
    return undisturbed && counts.park_ns >= 9 * MS;
}

/* A wait whose end is foreseen is slept away in two parts; others in one. */
static void test_foreseen(void)
{
    const struct {
        int64_t expected, deviation, window;
        int64_t parks;
    } cases[] = {
        {2 * MS, 0, MS, 2},       {2 * MS, MS / 10, MS, 2}, {2 * MS, MS, MS, 1},
        {2 * MS, 0, MS / 100, 1}, {2 * MS, 0, 0, 1},        {MS / 100, 0, MS, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int tries = 0;
        while (!wait_as_foreseen(cases[i].expected, cases[i].deviation, cases[i].window,
                                 cases[i].parks))
            CHECK(++tries < 100);
    }
}

static void test_yields_that_cost_too_much(void)
{
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_waiter_init(&waiter, (sv_budget){0, 50000, 0, 0}, false, &counts);
    for (int i = 0; i < 1000; i++) { /* the usual, and one mishap in a hundred */
        CHECK(sv_waiter_may_yield(&waiter));
        sv_waiter_learn_yield(&waiter, i % 100 == 50 ? 3 * MS : 2000);
    }
    /* Others keep the core: yields end soon, and are tried more and more rarely. */
    int yields = 0, last = 0, gap = 0;
    for (int i = 0; i < 4000; i++)
        if (sv_waiter_may_yield(&waiter)) {
            sv_waiter_learn_yield(&waiter, 3 * MS);
            CHECK(yields < 8 || i - last > gap);
            if (++yields >= 8)
                gap = i - last;
            last = i;
        }
    CHECK(yields >= 8 && yields <= 20);
    /* They are gone: the next probe finds that out at once. */
    while (!sv_waiter_may_yield(&waiter))
        ;
    sv_waiter_learn_yield(&waiter, 2000);
    for (int i = 0; i < 100; i++) {
        CHECK(sv_waiter_may_yield(&waiter));
        sv_waiter_learn_yield(&waiter, 2000);
    }
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 2000);
    start_deadline();
    test_learning();
    test_policy();
    test_who_stays_awake();
    test_foreseen();
    test_yields_that_cost_too_much();
    for (int processes = 0; processes < 2; processes++) {
        for (uint32_t num_workers = 1; num_workers <= WORKERS; num_workers++) {
            test_rounds(processes, num_workers, (sv_budget){0, 0, 0, 0}, rounds);
            test_rounds(processes, num_workers, (sv_budget){0, 10000, 0, 0}, rounds);
            test_rounds(processes, num_workers, (sv_budget){0, 0, 1, 0}, rounds);
            test_rounds(processes, num_workers, (sv_budget){0, 0, 10000, 0}, rounds);
        }
        test_rounds(processes, 1, (sv_budget){20000, 0, 0, 0}, rounds);
        test_rounds(processes, 1, (sv_budget){2000, 2000, 0, 0}, rounds);
    }
    return 0;
}
