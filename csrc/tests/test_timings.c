/* test_timings.c — each time lands in the bucket that its length names, and a reader sees all of it. */
#include "timings.h"

#include "check.h"

struct shared {
    sv_timings timings;
    uint32_t rounds;
};

static void test_buckets(void)
{
    CHECK(sv_timing_bucket(0) == 0);
    CHECK(sv_timing_bucket(511) == 0);
    CHECK(sv_timing_bucket(512) == 1);
    CHECK(sv_timing_bucket(UINT64_MAX) == SV_TIMING_BUCKETS - 1);
    for (uint32_t bucket = 1; bucket < SV_TIMING_BUCKETS - 1; bucket++) {
        uint64_t least = UINT64_C(1) << (SV_TIMING_FIRST_BITS - 1 + bucket);
        CHECK(sv_timing_bucket(least) == bucket);
        CHECK(sv_timing_bucket(2 * least - 1) == bucket);
        CHECK(sv_timing_bucket(2 * least) == bucket + 1);
    }
}

static void test_add(void)
{
    static sv_timings timings;
    uint64_t seen[2 * SV_TIMING_WORDS];
    sv_timing_add(&timings.step, 1000);
    sv_timing_add(&timings.step, 3000);
    sv_timing_add(&timings.step, 1001);
    sv_timing_add(&timings.step, -5); /* a clock that a damaged worker has set back */
    sv_timing_add(&timings.reset, INT64_MAX);
    sv_timings_read(&timings, seen);
    CHECK(seen[0] == 5001 && seen[1] == 3000);
    CHECK(seen[2 + 0] == 1 && seen[2 + 1] == 2 && seen[2 + 3] == 1);
    const uint64_t *reset = seen + SV_TIMING_WORDS;
    CHECK(reset[0] == INT64_MAX && reset[1] == INT64_MAX && reset[1 + SV_TIMING_BUCKETS] == 1);
}

static void add(void *argument)
{
    struct shared *shared = argument;
    for (uint32_t round = 0; round < shared->rounds; round++) {
        sv_timing_add(&shared->timings.step, 600);
        sv_timing_add(&shared->timings.reset, 1 << 20);
    }
}

/* While one adds, another sees numbers that never go back. */
static void test_reader(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    runner writer;
    uint64_t seen[2 * SV_TIMING_WORDS], last = 0;
    shared->rounds = rounds;
    run(&writer, process, add, shared);
    do {
        sv_timings_read(&shared->timings, seen);
        CHECK(seen[3] >= last && seen[0] % 600 == 0 && (seen[1] == 0 || seen[1] == 600));
        last = seen[3];
    } while (seen[SV_TIMING_WORDS] < (uint64_t)rounds << 20);
    join(&writer);
    CHECK(seen[SV_TIMING_WORDS + 2 + sv_timing_bucket(1 << 20)] == rounds);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 300000);
    start_deadline();
    test_buckets();
    test_add();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
