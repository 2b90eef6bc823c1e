/* primitives.c — what each primitive costs: ns an operation, and round trips between two processes.
 *
 * Prints one line a measurement: name, median and worst of several repetitions, in ns. */
#include <stdio.h>
#include <sys/syscall.h>

#include "affinity.h"
#include "check.h"
#include "segment.h"
#include "wait.h"
#include "watchdog.h"

#define CAPACITY 1024
#ifndef REPEATS /* primitives.py says how many */
#define REPEATS 9
#endif
#define MOST_NS 500000000 /* of a repetition */

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
    printf("%-44s %10.1f %10.1f\n", name, ns[REPEATS / 2], ns[REPEATS - 1]);
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
    sv_affinity affinity;
    sv_segment_sizes sizes = {1, 1, 64, 4096, 64, 0, 100};
    sv_ring_attach_producer(&producer, shared->requests, CAPACITY);
    sv_ring_attach_consumer(&consumer, shared->requests, CAPACITY);
    sv_byte_ring_attach_producer(&writer, shared->messages, 65536);
    sv_byte_ring_attach_consumer(&reader, shared->messages, 65536);

    printf("%-44s %10s %10s\n", "ns", "median", "worst");
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
    munmap(shared, sizeof *shared);
    return 0;
}
