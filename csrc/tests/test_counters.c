/* test_counters.c — a reader sees whole numbers that never go back, while the writer counts. */
#include "counters.h"
#include "check.h"

#define BIG (UINT64_C(1) << 40) /* both halves of a number change */

struct shared {
    sv_counters counters;
    uint32_t rounds;
};

static void count(void *argument)
{
    struct shared *shared = argument;
    for (uint64_t round = 1; round <= shared->rounds; round++) {
        sv_counter_set(&shared->counters.steps, round * (BIG + 1));
        sv_counter_set(&shared->counters.wakes, round);
    }
}

static void test_reader(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    runner writer;
    uint64_t steps = 0, wakes = 0;
    shared->rounds = rounds;
    run(&writer, process, count, shared);
    while (wakes < rounds) {
        uint64_t seen = sv_counter_get(&shared->counters.steps);
        CHECK(seen / (BIG + 1) * (BIG + 1) == seen && seen >= steps);
        steps = seen;
        seen = sv_counter_get(&shared->counters.wakes);
        CHECK(seen >= wakes);
        wakes = seen;
    }
    join(&writer);
    CHECK(sv_counter_get(&shared->counters.steps) == rounds * (BIG + 1));
    CHECK(sv_counter_get(&shared->counters.resets) == 0);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_or(argc, argv, 1000000);
    start_deadline();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
