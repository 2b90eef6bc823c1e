/* segment.h — the layout of the shared segment.
 *
 *     header          magic, version, sizes, offsets
 *     bell            the workers sleep here
 *     completion      the parent sleeps here
 *     policy          how long workers may spin when they wait
 *     notice          what the parent publishes for onlookers
 *     counters        one block a worker: what it has done
 *     past            one block a worker: its envs, and what its predecessors have done
 *     timings         one block an env: how long its steps and resets have taken, what it is doing
 *     texts           one a worker, about the wrappers of its envs
 *     requests        one ring a worker, parent to worker
 *     completions     one ring a worker, worker to parent
 *     infos           one byte ring a worker, worker to parent: infos, and observations of spaces
 *                     that have no fixed size
 *     actions         one byte ring a worker, parent to worker: actions of such spaces
 *     slabs           observations, actions, rewards, ...: laid out by the layer above
 *
 * Each part, and each ring, starts on a cache line of its own.  The whole layout follows from
 * sv_segment_sizes.  So opening a segment computes the plan again and compares: a header that does
 * not fit its own sizes, is larger than the mapping, or was changed by accident is refused.  From then
 * on only the private copy of the header is used.
 */
#ifndef SHMVEC_SEGMENT_H
#define SHMVEC_SEGMENT_H

#include "bell.h"
#include "completion.h"
#include "notice.h"
#include "ring.h"
#include "text.h"
#include "timings.h"
#include "wait.h"

#define SV_SEGMENT_MAGIC UINT64_C(0x316365766d6873ff)
#define SV_SEGMENT_VERSION 12

#define SV_MAX_WORKERS 65536
#define SV_MAX_ENVS 1048576

typedef struct {
    uint32_t num_workers;
    uint32_t num_envs;
    uint32_t ring_capacity; /* records in a request or completion ring; a power of two */
    uint32_t info_capacity; /* bytes in an info ring; a power of two */
    uint32_t action_capacity; /* bytes in an action ring; a power of two */
    uint32_t reserved;        /* zero: no padding in what the checksum covers */
    uint64_t slab_bytes;
} sv_segment_sizes;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t checksum; /* of everything below */
    sv_segment_sizes sizes;
    /* Offsets in bytes from the start of the segment; strides between two workers' rings. */
    uint64_t bell;
    uint64_t completion;
    uint64_t policy;
    uint64_t notice;
    uint64_t counters;
    uint64_t past;
    uint64_t timings;
    uint64_t texts;
    uint64_t requests;
    uint64_t completions;
    uint64_t record_stride;
    uint64_t infos;
    uint64_t info_stride;
    uint64_t actions;
    uint64_t action_stride;
    uint64_t slabs;
    uint64_t total_bytes;
} sv_segment;

/* Computes the layout.  False when a size is out of range (0, no power of two, or too large). */
bool sv_segment_plan(const sv_segment_sizes *sizes, sv_segment *plan);

/* Writes the header to a fresh, zeroed mapping of plan->total_bytes. */
void sv_segment_format(void *base, const sv_segment *plan);

/* Validates the header of a mapping of `mapped` bytes and copies it.  False: not a segment of this
 * version, or damaged. */
bool sv_segment_open(const void *base, uint64_t mapped, sv_segment *copy);

/* Renews the header, and the rings, counters and text of one worker, for its successor; its counts are
 * added to those of its predecessors.  Precondition: the worker is dead, and the caller has the only
 * handles, so that no other process reads or writes them now. */
void sv_segment_renew(void *base, const sv_segment *plan, uint32_t worker);

/* Sizes a shared-memory descriptor and reserves every page, so that no later write can fail with
 * SIGBUS.  Returns 0 or an errno: ENOSPC when there is not that much memory. */
int sv_segment_reserve(int descriptor, uint64_t bytes);

/* Maps shared memory of at least `bytes` bytes; then the descriptor can be closed.  Returns 0 or an
 * errno: EINVAL when there are fewer. */
int sv_segment_map(int descriptor, uint64_t bytes, void **base);

static inline sv_bell *sv_segment_bell(void *base, const sv_segment *plan)
{
    return (sv_bell *)((char *)base + plan->bell);
}

static inline sv_completion *sv_segment_completion(void *base, const sv_segment *plan)
{
    return (sv_completion *)((char *)base + plan->completion);
}

static inline sv_policy *sv_segment_policy(void *base, const sv_segment *plan)
{
    return (sv_policy *)((char *)base + plan->policy);
}

static inline sv_counters *sv_segment_counters(void *base, const sv_segment *plan, uint32_t worker)
{
    return (sv_counters *)((char *)base + plan->counters) + worker;
}

static inline sv_counters *sv_segment_past(void *base, const sv_segment *plan, uint32_t worker)
{
    return (sv_counters *)((char *)base + plan->past) + worker;
}

static inline sv_notice *sv_segment_notice(void *base, const sv_segment *plan)
{
    return (sv_notice *)((char *)base + plan->notice);
}

/* The bytes that onlookers read: all that lies before the rings. */
static inline uint64_t sv_segment_head_bytes(const sv_segment *plan)
{
    return plan->requests;
}

/* Precondition: env < sizes.num_envs. */
static inline sv_timings *sv_segment_timings(void *base, const sv_segment *plan, uint32_t env)
{
    return (sv_timings *)((char *)base + plan->timings) + env;
}

/* Precondition: worker < sizes.num_workers. */
static inline sv_text *sv_segment_text(void *base, const sv_segment *plan, uint32_t worker)
{
    return (sv_text *)((char *)base + plan->texts) + worker;
}

/* Rings of one worker.  Precondition: worker < sizes.num_workers. */
static inline void *sv_segment_requests(void *base, const sv_segment *plan, uint32_t worker)
{
    return (char *)base + plan->requests + worker * plan->record_stride;
}

static inline void *sv_segment_completions(void *base, const sv_segment *plan, uint32_t worker)
{
    return (char *)base + plan->completions + worker * plan->record_stride;
}

static inline void *sv_segment_infos(void *base, const sv_segment *plan, uint32_t worker)
{
    return (char *)base + plan->infos + worker * plan->info_stride;
}

static inline void *sv_segment_actions(void *base, const sv_segment *plan, uint32_t worker)
{
    return (char *)base + plan->actions + worker * plan->action_stride;
}

#endif
