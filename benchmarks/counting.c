/* counting.c — what counting for stats() costs: ns an env's step, and a request.
 *
 * Prints one line a measurement: name, median and worst of several repetitions, in ns. */
#include "check.h"
#include "timings.h"

#ifndef REPEATS /* costs.py says how many */
#define REPEATS 9
#endif
#define ROUNDS 1000000 /* of a repetition */
#define ENVS 16        /* of a worker */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#define MEASURE(name, statement)                                                                  \
    do {                                                                                          \
        double ns[REPEATS];                                                                       \
        for (int repeat = 0; repeat < REPEATS; repeat++) {                                        \
            int64_t start = sv_now_ns();                                                          \
            for (uint32_t round = 0; round < ROUNDS; round++) {                                   \
                statement;                                                                        \
            }                                                                                     \
            ns[repeat] = (double)(sv_now_ns() - start) / ROUNDS;                                  \
        }                                                                                         \
        qsort(ns, REPEATS, sizeof *ns, by_value);                                                 \
        printf("%-24s %10.1f %10.1f\n", name, ns[REPEATS / 2], ns[REPEATS - 1]);                  \
    } while (0)

int main(void)
{
    sv_counters counters = {0};
    sv_activity activity = {0};
    sv_counts counts = {0};
    static sv_timings timings[ENVS];

    printf("%-24s %10s %10s\n", "ns", "median", "worst");
    MEASURE("a reading of the clock", (void)sv_now_ns());
    MEASURE("a request", sv_counters_publish(&counters, &counts));
    uint64_t lap = sv_ticks(), now;
    MEASURE("an env's step", {
        now = sv_ticks();
        sv_timing_add(&timings[round % ENVS].step, (int64_t)(now - lap));
        sv_busy_begin(&activity, sv_busy(round % ENVS, false), (int64_t)now);
        lap = now;
    });
    return 0;
}
