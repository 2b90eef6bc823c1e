/* primitives.c — what each primitive costs: ns an operation, round trips between two processes, and
 * turns of several on one core.
 *
 * Prints one line a measurement: name, median and worst of several repetitions, in ns. */
#include <stdio.h>
#include <sys/syscall.h>

#include "affinity.h"
#include "check.h"
#include "segment.h"
#include "timings.h"
#include "wait.h"
#include "watchdog.h"

#define CAPACITY 1024
#ifndef REPEATS /* primitives.py says how many */
#define REPEATS 9
#endif
#define MOST_NS 500000000 /* of a repetition */
#define ENVS 16           /* of a worker */

struct shared {
    sv_bell bell;
    sv_completion completion;
    alignas(SV_CACHE_LINE) char requests[sizeof(sv_ring_shared) + CAPACITY * sizeof(sv_slot)];
    alignas(SV_CACHE_LINE) char messages[sizeof(sv_ring_shared) + 65536];
    sv_budget budget;
};

enum { SERVE, END };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, double *ns)
{
    qsort(ns, REPEATS, sizeof *ns, by_value);
    printf("%-46s %10.1f %10.1f\n", name, ns[REPEATS / 2], ns[REPEATS - 1]);
}

#define MEASURE(name, rounds, statement)                                                          \
    do {                                                                                          \
        double ns[REPEATS];                                                                       \
        for (int repeat = 0; repeat < REPEATS; repeat++) {                                        \
            int64_t start = sv_now_ns();                                                          \
            for (uint32_t round = 0; round < (rounds); round++) {                                 \
                statement;                                                                        \
            }                                                                                     \
            ns[repeat] = (double)(sv_now_ns() - start) / (rounds);                                \
        }                                                                                         \
        report(name, ns);                                                                         \
    } while (0)

static void serve(void *argument)
{
    struct shared *shared = argument;
    sv_ring requests;
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_ring_attach_consumer(&requests, shared->requests, CAPACITY);
    sv_waiter_init(&waiter, shared->budget, false, &counts);
    for (sv_record record = {0}; record.operation != END;) {
        while (sv_wait_request(&waiter, &shared->bell, &requests, 0, 50000000) != SV_WAIT_READY)
            ;
        sv_ring_try_pop(&requests, &record);
        sv_completion_add(&shared->completion);
    }
}

static void round_trip(const char *name, uint32_t rounds, sv_budget budget)
{
    struct shared *shared = shared_memory(sizeof *shared);
    shared->budget = budget;
    runner server;
    run(&server, true, serve, shared);
    sv_ring requests;
    sv_waiter waiter;
    sv_counts counts = {0};
    sv_ring_attach_producer(&requests, shared->requests, CAPACITY);
    sv_waiter_init(&waiter, budget, false, &counts);
    uint32_t target = 0;
    double ns[REPEATS];
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        int64_t start = sv_now_ns(), taken = 0;
        uint32_t round = 0;
        while (round < rounds && taken < MOST_NS) { /* a busy machine: a time slice a round */
            sv_record record = {.operation = SERVE};
            sv_ring_try_push(&requests, &record);
            sv_bell_ring(&shared->bell, SV_EVERYONE);
            target++;
            while (sv_wait_completion(&waiter, &shared->completion, target, 50000000) !=
                   SV_WAIT_READY)
                ;
            if (++round % 16 == 0)
                taken = sv_now_ns() - start;
        }
        ns[repeat] = (double)(sv_now_ns() - start) / round;
    }
    report(name, ns);
    sv_ring_try_push(&requests, &(sv_record){.operation = END});
    sv_bell_ring(&shared->bell, SV_EVERYONE);
    join(&server);
    munmap(shared, sizeof *shared);
}

#define TURNS 32
#define PAGES 200
#define PAGE 4096
#define ROUNDS 200 /* of a repetition */

/* Processes that take turns on one core, each waking the next; see `turns`. */
struct turns {
    struct {
        alignas(SV_CACHE_LINE) _Atomic uint32_t number; /* of this process's turns that have come */
        int64_t touching_ns[REPEATS];
    } of[TURNS];
    int64_t took_ns[REPEATS];
    uint32_t processes;
};

struct place {
    struct turns *turns;
    uint32_t index;
};

/* Some memory of a process's own: a line in each of PAGES pages, each holding the address of the
 * next, so that the core can fetch none ahead. */
static void **own_pages(void)
{
    char *memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    madvise(memory, PAGES * PAGE, MADV_NOHUGEPAGE);
    void **lines[PAGES];
    for (size_t i = 0; i < PAGES; i++) {
        size_t page = i * 77 % PAGES; /* each once, in no order that can be foreseen */
        lines[i] = (void **)(void *)(memory + page * PAGE + page % (PAGE / 64) * 64);
    }
    for (size_t i = 0; i < PAGES; i++)
        *lines[i] = lines[(i + 1) % PAGES];
    return lines[0];
}

static void take_turns(void *argument)
{
    const struct place *place = argument;
    struct turns *turns = place->turns;
    uint32_t next = (place->index + 1) % turns->processes;
    sv_affinity affinity;
    void **line = own_pages();
    sv_affinity_narrow(&affinity, 0); /* all to the same core, for good */
    for (uint32_t turn = 1; turn <= REPEATS * ROUNDS; turn++) {
        _Atomic uint32_t *mine = &turns->of[place->index].number;
        uint32_t seen;
        while ((seen = atomic_load_explicit(mine, memory_order_acquire)) < turn)
            sv_futex_wait(mine, seen, SV_NS_PER_S, SV_EVERYONE);
        int64_t start = sv_now_ns();
        for (size_t i = 0; i < PAGES; i++)
            line = *(void **volatile *)line;
        int64_t now = sv_now_ns();
        turns->of[place->index].touching_ns[(turn - 1) / ROUNDS] += now - start;
        if (place->index == 0) {
            if ((turn - 1) % ROUNDS == 0)
                turns->took_ns[(turn - 1) / ROUNDS] = start;
            if (turn % ROUNDS == 0) /* all others' turns but the last round's: near enough */
                turns->took_ns[(turn - 1) / ROUNDS] =
                    (now - turns->took_ns[(turn - 1) / ROUNDS]) * ROUNDS / (ROUNDS - 1);
        }
        /* release, pairs with the acquire above: turns follow one another */
        atomic_fetch_add_explicit(&turns->of[next].number, 1, memory_order_release);
        if (turns->processes > 1)
            sv_futex_wake(&turns->of[next].number, SV_EVERYONE);
    }
}

/* What taking turns on a core costs so many processes: the memory of each is touched faster while
 * the core still knows where it lies.  (On x86 Linux lets a core know that of six processes; who comes
 * back after more others than five finds every page anew.) */
static void turns(uint32_t processes)
{
    struct turns *turns = shared_memory(sizeof *turns);
    struct place places[TURNS];
    runner runners[TURNS];
    double touching[REPEATS], handing[REPEATS];
    char name[64];
    turns->processes = processes;
    for (uint32_t i = 0; i < processes; i++) {
        places[i] = (struct place){turns, i};
        run(&runners[i], true, take_turns, &places[i]);
    }
    atomic_store(&turns->of[0].number, 1);
    sv_futex_wake(&turns->of[0].number, SV_EVERYONE);
    for (uint32_t i = 0; i < processes; i++)
        join(&runners[i]);
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        int64_t ns = 0;
        for (uint32_t i = 0; i < processes; i++)
            ns += turns->of[i].touching_ns[repeat];
        touching[repeat] = (double)ns / ROUNDS / processes;
        handing[repeat] = (double)turns->took_ns[repeat] / ROUNDS / processes - touching[repeat];
    }
    snprintf(name, sizeof name, "%2u take turns on a core: touch %d pages", processes, PAGES);
    report(name, touching);
    snprintf(name, sizeof name, "%2u take turns on a core: hand over", processes);
    if (processes > 1)
        report(name, handing);
    munmap(turns, sizeof *turns);
}

int main(void)
{
    start_deadline(); /* whoever started it may be gone */
    struct shared *shared = shared_memory(sizeof *shared);
    sv_ring producer, consumer;
    sv_byte_ring writer, reader;
    sv_record record = {0};
    const void *payload;
    uint32_t bytes, tag;
    sv_segment plan, copy;
    sv_counters counters = {0};
    sv_counts counts = {0};
    static sv_timings timings[ENVS];
    sv_affinity affinity;
    sv_segment_sizes sizes = {1, 1, 64, 4096, 64, 0, 100};
    sv_ring_attach_producer(&producer, shared->requests, CAPACITY);
    sv_ring_attach_consumer(&consumer, shared->requests, CAPACITY);
    sv_byte_ring_attach_producer(&writer, shared->messages, 65536);
    sv_byte_ring_attach_consumer(&reader, shared->messages, 65536);

    printf("%-46s %10s %10s\n", "ns", "median", "worst");
    MEASURE("clock", 1000000, (void)sv_now_ns());
    MEASURE("pause", 1000000, sv_pause());
    MEASURE("yield", 200000, sv_yield());
    MEASURE("bell: ring, nobody sleeps", 1000000, sv_bell_ring(&shared->bell, SV_EVERYONE));
    MEASURE("bell: ring for one, waiter bit set", 200000, {
        sv_bell_listen(&shared->bell);
        sv_bell_ring(&shared->bell, 1);
    });
    MEASURE("completion: add, not armed", 1000000, sv_completion_add(&shared->completion));
    MEASURE("ring: push + pop a record", 1000000, {
        sv_ring_try_push(&producer, &record);
        sv_ring_try_pop(&consumer, &record);
    });
    MEASURE("byte ring: send + receive 64 bytes", 1000000, {
        memset(sv_byte_ring_reserve(&writer, 64, 0), 1, 64);
        sv_byte_ring_commit(&writer);
        sv_byte_ring_peek(&reader, &payload, &bytes, &tag);
        sv_byte_ring_release(&reader);
    });
    sv_segment_plan(&sizes, &plan);
    MEASURE("segment: open (validate)", 1000000, sv_segment_open(&plan, UINT64_MAX, &copy));
    MEASURE("counters: publish", 1000000, sv_counters_publish(&counters, &counts));
    uint64_t lap = sv_ticks(), now;
    MEASURE("counters: tell of a step, and how long it took", 1000000, {
        now = sv_ticks();
        sv_timing_add(&timings[round % ENVS].step, (int64_t)(now - lap));
        sv_busy_begin(&counters, sv_busy(round % ENVS, false), (int64_t)now);
        lap = now;
    });
    MEASURE("affinity: narrow + widen", 20000, {
        sv_affinity_narrow(&affinity, 0);
        sv_affinity_widen(&affinity);
    });
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    MEASURE("watchdog: start + stop", 500, {
        sv_watchdog_start(self, 0);
        sv_watchdog_stop();
    });
    close(self);
    round_trip("round trip between processes, pause", 200000, (sv_budget){1000000, 0, 0, 0});
    round_trip("round trip between processes, yield", 50000, (sv_budget){0, 1000000, 0, 0});
    round_trip("round trip between processes, park", 10000, (sv_budget){0, 0, 0, 0});
    const uint32_t numbers[] = {1, 2, 4, 6, 8, 16, TURNS};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        turns(numbers[i]);
    munmap(shared, sizeof *shared);
    return 0;
}
