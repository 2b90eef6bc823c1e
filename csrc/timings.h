/* timings.h — how long each env's steps and resets have taken, and what it is doing now.
 *
 * For envs.stats().  Each env has two histograms, on cache lines of its own in the segment: a bucket
 * for each power of two of nanoseconds, the sum and the longest.  The env's worker is the only writer,
 * so that adding is a load and a store; the parent, or another process that has mapped the segment,
 * reads at any time.  The numbers carry no data and order nothing, so all accesses are relaxed and
 * pair with none.  A reader may see a bucket newer than the sum, never half of a number.
 *
 * Histograms belong to the env, not to the process: a worker's successor continues them.
 */
#ifndef SHMVEC_TIMINGS_H
#define SHMVEC_TIMINGS_H

#include "counters.h"

#define SV_TIMING_BUCKETS 30
#define SV_TIMING_FIRST_BITS 9 /* bucket 0: below 2^9 ns; b: from 2^(8+b); the last: 137 s and more */
#define SV_TIMING_WORDS (2 + SV_TIMING_BUCKETS)

typedef struct {
    _Atomic uint64_t total_ns;
    _Atomic uint64_t longest_ns;
    _Atomic uint64_t buckets[SV_TIMING_BUCKETS];
} sv_timing;

/* The histograms of one env; and its activity, if its worker is busy with several (counters.h). */
typedef struct {
    alignas(SV_CACHE_LINE) sv_timing step;
    sv_timing reset;
    sv_activity activity;
} sv_timings;

_Static_assert(sizeof(sv_timing) == SV_TIMING_WORDS * sizeof(uint64_t), "nothing between");
_Static_assert(sizeof(sv_timings) % SV_CACHE_LINE == 0, "lines of its own");

/* The bucket of a time. */
static inline uint32_t sv_timing_bucket(uint64_t ns)
{
    if (ns >> SV_TIMING_FIRST_BITS == 0)
        return 0;
    uint32_t bucket = 64 - SV_TIMING_FIRST_BITS - (uint32_t)__builtin_clzll(ns);
    return bucket < SV_TIMING_BUCKETS ? bucket : SV_TIMING_BUCKETS - 1;
}

/* The env's worker: adds a time to a histogram. */
static inline void sv_timing_add(sv_timing *timing, int64_t elapsed)
{
    uint64_t ns = elapsed > 0 ? (uint64_t)elapsed : 0;
    _Atomic uint64_t *bucket = &timing->buckets[sv_timing_bucket(ns)];
    sv_counter_set(bucket, sv_counter_get(bucket) + 1);
    sv_counter_set(&timing->total_ns, sv_counter_get(&timing->total_ns) + ns);
    if (ns > sv_counter_get(&timing->longest_ns))
        sv_counter_set(&timing->longest_ns, ns);
}

/* A reader: copies the sum, the longest and the buckets of steps, then those of resets. */
static inline void sv_timings_read(const sv_timings *timings, uint64_t words[2 * SV_TIMING_WORDS])
{
    const sv_timing *kinds[] = {&timings->step, &timings->reset};
    for (size_t kind = 0; kind < 2; kind++) {
        *words++ = sv_counter_get(&kinds[kind]->total_ns);
        *words++ = sv_counter_get(&kinds[kind]->longest_ns);
        for (size_t bucket = 0; bucket < SV_TIMING_BUCKETS; bucket++)
            *words++ = sv_counter_get(&kinds[kind]->buckets[bucket]);
    }
}

#endif
