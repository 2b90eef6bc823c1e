/* primitives.c — what each primitive costs: ns an operation.
 *
 * Prints one line a measurement: name, median and worst of several repetitions, in ns. */
#include <stdio.h>

#include "check.h"
#include "timings.h"
#include "wait.h"

#define CAPACITY 1024
#ifndef REPEATS /* costs.py says how many */
#define REPEATS 9
#endif
#define ENVS 16 /* of a worker */

struct shared {
    sv_bell bell;
    sv_completion completion;
    alignas(SV_CACHE_LINE) char requests[sizeof(sv_ring_shared) + CAPACITY * sizeof(sv_slot)];
    alignas(SV_CACHE_LINE) char messages[sizeof(sv_ring_shared) + 65536];
};

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

int main(void)
{
    start_deadline(); /* whoever started it may be gone */
    struct shared *shared = shared_memory(sizeof *shared);
    sv_ring producer, consumer;
    sv_byte_ring writer, reader;
    sv_record record = {0};
    const void *payload;
    uint32_t bytes, tag;
    sv_counters counters = {0};
    sv_activity activity = {0};
    sv_counts counts = {0};
    static sv_timings timings[ENVS];
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
    MEASURE("counters: publish", 1000000, sv_counters_publish(&counters, &counts));
    uint64_t lap = sv_ticks(), now;
    MEASURE("counters: tell of a step, and how long it took", 1000000, {
        now = sv_ticks();
        sv_timing_add(&timings[round % ENVS].step, (int64_t)(now - lap));
        sv_busy_begin(&activity, sv_busy(round % ENVS, false), (int64_t)now);
        lap = now;
    });
    munmap(shared, sizeof *shared);
    return 0;
}
