/* test_counters.c — a reader sees whole numbers that never go back, while the writer counts. */
#include "counters.h"

#include <string.h>

#include "check.h"

#define BIG (UINT64_C(1) << 40) /* both halves of a number change */

struct shared {
    sv_counters counters;
    uint32_t rounds;
    _Atomic bool over;
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

/* Every counter arrives as it was counted, in its line. */
static void test_publish(void)
{
    sv_counters counters = {0};
    const sv_counter_line *tables[] = {sv_wait_lines, sv_work_lines};
    sv_counts counts;
    int64_t values[sizeof counts / sizeof(int64_t)];
    size_t seen = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        values[i] = (int64_t)(i + 1) << 40 | 1;
    memcpy(&counts, values, sizeof counts);
    sv_busy_begin(&counters.activity, 7, 8);
    sv_counters_publish(&counters, &counts);
    for (size_t table = 0; table < 2; table++)
        for (const sv_counter_line *line = tables[table]; line->name != NULL; line++)
            CHECK(sv_counter_get(sv_counter_at(&counters, line)) == (uint64_t)values[seen++]);
    CHECK(seen == sizeof values / sizeof *values && counts.waits == values[1]);
    CHECK(strcmp(sv_wait_lines[1].name, "waits") == 0 && sv_wait_lines[1].help[0] != 0);
    CHECK(sv_counter_get(&counters.wakes) == (uint64_t)counts.wakes);
    CHECK(sv_counter_get(&counters.activity.busy) == 7 && sv_counter_get(&counters.activity.since) == 8);
}

static void be_busy(void *argument)
{
    struct shared *shared = argument;
    for (uint32_t env = 0; env < shared->rounds; env++) {
        sv_busy_begin(&shared->counters.activity, sv_busy(env, env % 3), env);
        if (env % 4 == 3)
            sv_busy_begin(&shared->counters.activity, 0, 0);
    }
    atomic_store(&shared->over, true);
}

/* The same, one step of the reader at a time: it sees what is being done, that ends, and only then
 * the reader looks when it began. */
static void test_end_between(void)
{
    sv_counters counters = {0};
    sv_busy_begin(&counters.activity, sv_busy(3, SV_IN_STEP), 1000);
    uint64_t busy = atomic_load(&counters.activity.busy);
    sv_busy_begin(&counters.activity, 0, 0);
    CHECK(busy == sv_busy(3, SV_IN_STEP) && sv_counter_get(&counters.activity.since) >= 1000);
    int64_t elapsed;
    CHECK(sv_busy_for(&counters.activity, 2000, &elapsed) == 0);
}

/* Nothing is seen with the time at which something before it began. */
static void test_busy(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    runner writer;
    uint64_t seen, last = 0;
    int64_t elapsed;
    shared->rounds = rounds;
    run(&writer, process, be_busy, shared);
    while (!atomic_load(&shared->over)) {
        seen = sv_busy_for(&shared->counters.activity, rounds, &elapsed);
        if (seen == 0)
            continue;
        uint64_t env = sv_busy_env(seen);
        CHECK(seen >= last && env < rounds && sv_busy_doing(seen) == env % 3);
        CHECK(elapsed >= 0 && (uint64_t)elapsed <= rounds - env);
        last = seen;
    }
    join(&writer);
    munmap(shared, sizeof *shared);
}

/* Whatever a damaged segment says, a time comes out. */
static void test_nonsense(void)
{
    sv_counters counters = {0};
    const uint64_t times[] = {0, UINT64_MAX, UINT64_C(1) << 63, (UINT64_C(1) << 63) - 1};
    int64_t elapsed;
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        sv_counter_set(&counters.activity.since, times[i]);
        sv_busy_for(&counters.activity, INT64_MAX, &elapsed);
        sv_busy_for(&counters.activity, 0, &elapsed);
        CHECK(sv_busy_name(times[i]) != NULL);
    }
    CHECK(strcmp(sv_busy_name(sv_busy(UINT32_MAX, SV_IN_CALL)), "call") == 0);
    CHECK(sv_busy_env(sv_busy(UINT32_MAX, SV_IN_RESET)) == UINT32_MAX);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 1000000);
    start_deadline();
    test_nonsense();
    test_publish();
    test_reader(false, rounds);
    test_reader(true, rounds);
    test_end_between();
    test_busy(false, rounds);
    test_busy(true, rounds);
    return 0;
}
