/* test_bell.c — the bell's guarantees: no lost wake, one wake for all, none without a sleeper. */
#include "bell.h"
#include "check.h"

#define SLEEPERS 4
#define LONG (INT64_C(5) * SV_NS_PER_S) /* a lost wake shows as a time-out of this length */

struct shared {
    sv_bell bell;
    _Atomic uint32_t work;              /* the last round that was published */
    _Atomic uint32_t seen[SLEEPERS];    /* the last round each sleeper has seen */
    uint32_t rounds;
};

struct sleeper {
    struct shared *shared;
    uint32_t index;
};

static void test_states(void)
{
    sv_bell bell = {0};
    uint32_t before = atomic_load(&bell.word);
    sv_bell_ring(&bell, SV_EVERYONE);
    CHECK(atomic_load(&bell.word) != before);

    uint32_t ticket = sv_bell_listen(&bell);
    CHECK(ticket & 1);
    CHECK(sv_bell_sleep(&bell, ticket, 1, 1000000) == ETIMEDOUT);
    sv_bell_ring(&bell, sv_bell_mask(3)); /* for some: the waiter bit stays */
    CHECK(atomic_load(&bell.word) & 1);
    CHECK(sv_bell_sleep(&bell, ticket, 1, LONG) == 0); /* rung since: does not sleep */
    sv_bell_ring(&bell, SV_EVERYONE);
    CHECK(!(atomic_load(&bell.word) & 1));
    CHECK(atomic_load(&bell.rung_at) > 0);

    atomic_store(&bell.word, UINT32_MAX - 1); /* the epoch wraps */
    ticket = sv_bell_listen(&bell);
    sv_bell_ring(&bell, SV_EVERYONE);
    CHECK(atomic_load(&bell.word) == 0);
    CHECK(sv_bell_sleep(&bell, ticket, 1, LONG) == 0);
    CHECK(sv_bell_mask(0) == 1 && sv_bell_mask(33) == 2);
}

/* Sleeps at once, every time: budget zero, the hardest case for lost wakes. */
static void sleep_through(struct shared *shared, uint32_t index)
{
    for (uint32_t seen = 0; seen < shared->rounds;) {
        uint32_t work;
        while ((work = atomic_load_explicit(&shared->work, memory_order_acquire)) == seen) {
            uint32_t ticket = sv_bell_listen(&shared->bell);
            if (atomic_load_explicit(&shared->work, memory_order_acquire) != seen)
                continue;
            CHECK(sv_bell_sleep(&shared->bell, ticket, sv_bell_mask(index), LONG) != ETIMEDOUT);
        }
        seen = work;
        atomic_store_explicit(&shared->seen[index], seen, memory_order_release);
    }
}

static void sleeper_body(void *argument)
{
    struct sleeper *sleeper = argument;
    sleep_through(sleeper->shared, sleeper->index);
}

static void ring_through(struct shared *shared, uint32_t num_sleepers)
{
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        atomic_store_explicit(&shared->work, round, memory_order_release);
        /* By turns for everyone at once and for each alone. */
        if (round % 2)
            sv_bell_ring(&shared->bell, SV_EVERYONE);
        else
            for (uint32_t i = 0; i < num_sleepers; i++)
                sv_bell_ring(&shared->bell, sv_bell_mask(i));
        for (uint32_t i = 0; i < num_sleepers; i++)
            while (atomic_load_explicit(&shared->seen[i], memory_order_acquire) != round)
                sv_yield();
    }
}

static void test_no_lost_wake(bool processes, uint32_t num_sleepers, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    struct sleeper sleepers[SLEEPERS];
    runner runners[SLEEPERS];
    shared->rounds = rounds;
    atomic_store(&shared->bell.word, UINT32_MAX - rounds); /* wraps half-way */
    for (uint32_t i = 0; i < num_sleepers; i++) {
        sleepers[i] = (struct sleeper){shared, i};
        run(&runners[i], processes, sleeper_body, &sleepers[i]);
    }
    ring_through(shared, num_sleepers);
    for (uint32_t i = 0; i < num_sleepers; i++)
        join(&runners[i]);
    munmap(shared, sizeof *shared);
}

struct dozing {
    sv_bell bell;
    _Atomic uint32_t work[SLEEPERS];
    _Atomic uint32_t seen[SLEEPERS];
    uint32_t rounds;
};

struct dozer {
    struct dozing *shared;
    uint32_t index;
    int descriptor;
};

/* Until it has seen its last round of work; which those before it are does not matter. */
static void doze_through(void *argument)
{
    struct dozer *dozer = argument;
    struct dozing *shared = dozer->shared;
    _Atomic uint32_t *work = &shared->work[dozer->index];
    for (uint32_t seen = 0, now; seen < shared->rounds; seen = now) {
        while ((now = atomic_load_explicit(work, memory_order_acquire)) == seen) {
            char byte;
            sv_bell_doze(&shared->bell);
            if (atomic_load_explicit(work, memory_order_acquire) == seen)
                CHECK(read(dozer->descriptor, &byte, 1) == 1); /* a lost wake blocks for ever */
            sv_bell_awake(&shared->bell);
        }
        atomic_store_explicit(&shared->seen[dozer->index], now, memory_order_release);
    }
}

/* Gives work to the dozers from `first` to `end` and waits until they have seen it. */
static void ring_dozers(struct dozing *shared, uint32_t round, uint32_t first, uint32_t end,
                        uint32_t num_dozers, const int *descriptors)
{
    bool all = end - first == num_dozers;
    uint32_t mask = all ? SV_EVERYONE : 0;
    for (uint32_t i = first; i < end; i++) {
        mask |= sv_bell_mask(i);
        atomic_store_explicit(&shared->work[i], round, memory_order_release);
    }
    if (sv_bell_ring(&shared->bell, mask) && sv_bell_has_dozers(&shared->bell))
        for (uint32_t i = first; i < end; i++)
            CHECK(write(descriptors[i], "", 1) == 1);
    for (uint32_t i = first; i < end; i++)
        while (atomic_load_explicit(&shared->seen[i], memory_order_acquire) != round)
            sv_yield();
}

/* By turns for all, for some and for one alone: the others sleep on. */
static void test_dozing(bool processes, uint32_t num_dozers, uint32_t rounds)
{
    struct dozing *shared = shared_memory(sizeof *shared);
    struct dozer dozers[SLEEPERS];
    runner runners[SLEEPERS];
    int descriptors[SLEEPERS];
    shared->rounds = rounds;
    for (uint32_t i = 0; i < num_dozers; i++) {
        int ends[2];
        CHECK(pipe(ends) == 0);
        descriptors[i] = ends[1];
        dozers[i] = (struct dozer){shared, i, ends[0]};
        run(&runners[i], processes, doze_through, &dozers[i]);
    }
    for (uint32_t round = 1; round <= rounds; round++) {
        uint32_t one = round / 3 % num_dozers;
        uint32_t first = round % 3 == 0 || round == rounds ? 0 : one;
        uint32_t end = round % 3 == 1 && round != rounds ? one + 1 : num_dozers;
        ring_dozers(shared, round, first, end, num_dozers, descriptors);
    }
    for (uint32_t i = 0; i < num_dozers; i++) {
        join(&runners[i]);
        close(dozers[i].descriptor);
        close(descriptors[i]);
    }
    CHECK(!sv_bell_has_dozers(&shared->bell));
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 20000);
    start_deadline();
    test_states();
    test_no_lost_wake(false, 1, rounds);
    test_no_lost_wake(false, SLEEPERS, rounds / 4);
    test_no_lost_wake(true, 1, rounds);
    test_no_lost_wake(true, SLEEPERS, rounds / 4);
    for (int processes = 0; processes < 2; processes++) {
        test_dozing(processes, 1, rounds);
        test_dozing(processes, SLEEPERS, rounds / 4);
    }
    return 0;
}
