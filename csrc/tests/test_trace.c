/* test_trace.c — entries come back as written, the oldest go first, and none is half of another. */
#include "trace.h"

#include "check.h"
#include "wait.h"

#define SIZE 64
#define RINGS 2

struct shared {
    alignas(SV_CACHE_LINE) char memory[2 * SV_CACHE_LINE + RINGS * (SV_CACHE_LINE + SIZE * 24)];
    uint32_t rounds;
};

static sv_trace_entry entries[SIZE];

static void test_layout(void)
{
    CHECK(sv_trace_bytes(RINGS, SIZE) <= sizeof((struct shared *)0)->memory);
    CHECK(sv_trace_ring_bytes(SIZE) % SV_CACHE_LINE == 0);
}

static void test_order(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_trace trace, other;
    uint64_t lost;
    sv_trace_attach(&other, shared->memory, SIZE, 0, 0);
    sv_trace_attach(&trace, shared->memory, SIZE, 1, 0);
    CHECK(sv_trace_read(shared->memory, SIZE, 1, entries, &lost) == 0 && lost == 0);
    sv_trace_add(&other, SV_TRACE_RESET, 9, 1, 2);
    for (uint32_t i = 0; i < SIZE - 1; i++)
        sv_trace_add(&trace, SV_TRACE_STEP, i, i, i + 1);
    CHECK(sv_trace_read(shared->memory, SIZE, 1, entries, &lost) == SIZE - 1 && lost == 0);
    CHECK(entries[0].env == 0 && entries[SIZE - 2].env == SIZE - 2);
    /* Full: each new one costs the oldest. */
    for (uint32_t i = SIZE - 1; i < 3 * SIZE; i++) {
        sv_trace_add(&trace, SV_TRACE_STEP, i, i, i + 1);
        CHECK(sv_trace_read(shared->memory, SIZE, 1, entries, &lost) == SIZE - 1);
        CHECK(lost == i + 2 - SIZE && entries[0].env == lost && entries[SIZE - 2].env == i);
        CHECK(entries[5].begin == entries[5].env && entries[5].end == entries[5].begin + 1);
        CHECK(entries[5].kind == SV_TRACE_STEP);
    }
    /* A successor goes on behind what its predecessor has left. */
    sv_trace_attach(&trace, shared->memory, SIZE, 1, 0);
    sv_trace_add(&trace, SV_TRACE_ATTACH, 77, 5, 5);
    CHECK(sv_trace_read(shared->memory, SIZE, 1, entries, &lost) == SIZE - 1);
    CHECK(entries[SIZE - 2].env == 77 && entries[SIZE - 3].env == 3 * SIZE - 1);
    CHECK(sv_trace_read(shared->memory, SIZE, 0, entries, &lost) == 1 && entries[0].env == 9);
    munmap(shared, sizeof *shared);
}

static void test_spans(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_trace trace;
    uint64_t lost;
    sv_trace_attach(&trace, shared->memory, SIZE, 0, SV_TRACE_TAKE);
    sv_trace_enter(&trace, SV_TRACE_CALLER, 10);
    sv_trace_enter(&trace, SV_TRACE_SEND, 20);
    sv_trace_enter(&trace, SV_TRACE_SEND, 25);  /* goes on */
    sv_trace_enter(&trace, SV_TRACE_PAUSE, 30); /* which takes no time */
    sv_trace_enter(&trace, SV_TRACE_TAKE, 30);
    sv_trace_enter(&trace, SV_TRACE_NOTHING, 40);
    sv_trace_enter(&trace, SV_TRACE_CALLER, 50);
    CHECK(sv_trace_read(shared->memory, SIZE, 0, entries, &lost) == 3);
    CHECK(entries[0].kind == SV_TRACE_CALLER && entries[0].begin == 10 && entries[0].end == 20);
    CHECK(entries[1].kind == SV_TRACE_SEND && entries[1].begin == 20 && entries[1].end == 30);
    CHECK(entries[2].kind == SV_TRACE_TAKE && entries[2].begin == 30 && entries[2].end == 40);
    CHECK(!sv_trace_is_on(&trace));
    sv_trace_turn(shared->memory, true);
    CHECK(sv_trace_is_on(&trace));
    sv_trace_turn(shared->memory, false);
    CHECK(!sv_trace_is_on(&trace));
    munmap(shared, sizeof *shared);
}

/* The phases of waits that a trace has are those that are counted. */
static void test_waits(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_trace trace;
    sv_counts counts = {0};
    sv_completion completion = {0};
    sv_waiter waiter;
    uint64_t lost;
    int64_t pause = 0, yield = 0, park = 0, last = 0;
    sv_trace_attach(&trace, shared->memory, SIZE, 0, SV_TRACE_NOTHING);
    sv_waiter_init(&waiter, (sv_budget){100000, 100000, 0, 0}, false, &counts);
    waiter.trace = &trace;
    for (uint32_t target = 1; target <= 10; target++) {
        CHECK(sv_wait_completion(&waiter, &completion, target, 1000000) == SV_WAIT_SLICE);
        sv_completion_add(&completion);
        CHECK(sv_wait_completion(&waiter, &completion, target, 1000000) == SV_WAIT_READY);
    }
    uint32_t count = sv_trace_read(shared->memory, SIZE, 0, entries, &lost);
    CHECK(count >= 10 && lost == 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(entries[i].begin >= last && entries[i].end > entries[i].begin);
        last = entries[i].end;
        int64_t ns = entries[i].end - entries[i].begin;
        *(entries[i].kind == SV_TRACE_PAUSE   ? &pause
          : entries[i].kind == SV_TRACE_YIELD ? &yield
                                              : &park) += ns;
    }
    CHECK(pause == counts.pause_ns && yield == counts.yield_ns && park == counts.park_ns);
    munmap(shared, sizeof *shared);
}

static void write_all(void *argument)
{
    struct shared *shared = argument;
    sv_trace trace;
    sv_trace_attach(&trace, shared->memory, SIZE, 1, 0);
    for (uint32_t i = 0; i < shared->rounds; i++)
        sv_trace_add(&trace, i % 7 + 1, i, 3 * (int64_t)i, 3 * (int64_t)i + 2);
}

/* While one goes round and round, another sees whole entries that follow each other. */
static void test_reader(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    runner writer;
    uint64_t lost, last = 0;
    uint32_t count;
    shared->rounds = rounds;
    run(&writer, process, write_all, shared);
    do {
        count = sv_trace_read(shared->memory, SIZE, 1, entries, &lost);
        for (uint32_t i = 0; i < count; i++) {
            CHECK(entries[i].env == lost + i && entries[i].begin == 3 * (int64_t)entries[i].env);
            CHECK(entries[i].end == entries[i].begin + 2);
            CHECK(entries[i].kind == entries[i].env % 7 + 1);
        }
        CHECK(lost + count >= last);
        last = lost + count;
    } while (last < rounds);
    join(&writer);
    CHECK(count == SIZE - 1);
    munmap(shared, sizeof *shared);
}

/* Damage of what is shared is read as nonsense, within bounds. */
static void test_damage(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    const uint64_t tails[] = {1, SIZE - 1, SIZE, UINT32_MAX, UINT64_MAX - 3, UINT64_MAX};
    sv_trace trace;
    uint64_t lost;
    for (size_t i = 0; i < sizeof tails / sizeof *tails; i++) {
        memset(shared->memory, (int)(0x5a * i), sizeof shared->memory);
        atomic_store_explicit(&sv_trace_ring_at(shared->memory, SIZE, 0)->tail, tails[i],
                              memory_order_relaxed);
        CHECK(sv_trace_read(shared->memory, SIZE, 0, entries, &lost) <= SIZE);
        sv_trace_attach(&trace, shared->memory, SIZE, 0, 0);
        for (uint32_t j = 0; j < 2 * SIZE; j++)
            sv_trace_add(&trace, SV_TRACE_STEP, j, j, j);
        CHECK(sv_trace_read(shared->memory, SIZE, 0, entries, &lost) <= SIZE);
    }
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 300000);
    start_deadline();
    test_layout();
    test_order();
    test_spans();
    test_waits();
    test_damage();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
