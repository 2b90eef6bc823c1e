/* test_completion.c — the parent is woken when, and only when, its target is reached. */
#include "completion.h"
#include "check.h"

#define WORKERS 4
#define LONG (INT64_C(5) * SV_NS_PER_S)

struct shared {
    sv_completion completion;
    alignas(SV_CACHE_LINE) _Atomic uint32_t round;
    uint32_t rounds;
};

static void test_states(void)
{
    sv_completion completion = {0};
    CHECK(sv_completion_check(&completion, 0));
    CHECK(!sv_completion_check(&completion, 1));
    CHECK(!sv_completion_arm(&completion, 0)); /* reached already */
    CHECK(sv_completion_arm(&completion, 2));
    CHECK(sv_completion_sleep(&completion, 2, 1000000) == ETIMEDOUT);
    CHECK(!sv_completion_add(&completion)); /* 1 of 2: no wake */
    CHECK(sv_completion_add(&completion));  /* 2 of 2: woken, once */
    CHECK(sv_completion_sleep(&completion, 2, LONG) == 0);
    CHECK(!sv_completion_add(&completion)); /* nobody armed */
    CHECK(sv_completion_check(&completion, 2) && sv_completion_check(&completion, 3));
}

static void test_wrap(uint32_t start)
{
    sv_completion completion;
    atomic_store(&completion.word, (uint64_t)start << 32);
    for (uint32_t i = 1; i <= 4; i++) {
        CHECK(!sv_completion_check(&completion, start + i));
        CHECK(sv_completion_arm(&completion, start + i));
        CHECK(sv_completion_add(&completion));
        CHECK(sv_completion_check(&completion, start + i));
        CHECK(!sv_completion_check(&completion, start + i + 1));
    }
}

/* What is left of the requests that are issued, wherever the counts are. */
static void test_left(uint32_t start)
{
    sv_completion completion = {0};
    atomic_store(&completion.word, (uint64_t)start << 32);
    sv_completion_issue(&completion, start + 3);
    CHECK(sv_completion_left(&completion) == 3);
    CHECK(sv_completion_arm(&completion, start + 3));
    for (uint32_t left = 3; left-- > 0;) {
        sv_completion_add(&completion);
        CHECK(sv_completion_left(&completion) == left);
    }
}

static void work(void *argument)
{
    struct shared *shared = argument;
    for (uint32_t round = 1; round <= shared->rounds; round++) {
        while (atomic_load_explicit(&shared->round, memory_order_acquire) < round)
            sv_yield();
        sv_completion_add(&shared->completion);
        CHECK(sv_completion_left(&shared->completion) < 2 * WORKERS);
    }
}

static void test_no_lost_wake(bool processes, uint32_t num_workers, uint32_t start,
                              uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    runner runners[WORKERS];
    shared->rounds = rounds;
    atomic_store(&shared->completion.word, (uint64_t)start << 32);
    for (uint32_t i = 0; i < num_workers; i++)
        run(&runners[i], processes, work, shared);
    uint32_t target = start;
    for (uint32_t round = 1; round <= rounds; round++) {
        target += num_workers;
        sv_completion_issue(&shared->completion, target);
        atomic_store_explicit(&shared->round, round, memory_order_release);
        while (!sv_completion_check(&shared->completion, target))
            if (sv_completion_arm(&shared->completion, target))
                CHECK(sv_completion_sleep(&shared->completion, target, LONG) != ETIMEDOUT);
    }
    for (uint32_t i = 0; i < num_workers; i++)
        join(&runners[i]);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 20000);
    start_deadline();
    test_states();
    test_wrap((UINT32_C(1) << 31) - 2);
    test_wrap(UINT32_MAX - 1);
    test_left(0);
    test_left(UINT32_MAX - 1);
    test_no_lost_wake(false, 1, 0, rounds);
    test_no_lost_wake(false, WORKERS, (UINT32_C(1) << 31) - rounds / 2, rounds / 4);
    test_no_lost_wake(true, 1, UINT32_MAX - rounds / 2, rounds);
    test_no_lost_wake(true, WORKERS, UINT32_MAX - rounds / 2, rounds / 4);
    return 0;
}
