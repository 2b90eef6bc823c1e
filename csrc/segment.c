/* segment.c — see segment.h for the layout. */
#include "segment.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_SLAB_BYTES (UINT64_C(1) << 46)
#define MIN_CAPACITY 64u
#define MAX_CAPACITY (1u << 30)

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + SV_CACHE_LINE - 1) / SV_CACHE_LINE * SV_CACHE_LINE;
}

static bool is_capacity(uint32_t capacity)
{
    return capacity >= MIN_CAPACITY && capacity <= MAX_CAPACITY &&
           (capacity & (capacity - 1)) == 0;
}

/* FNV-1a of the sizes and offsets: against accidents, not against malice. */
static uint32_t checksum(const sv_segment *plan)
{
    const unsigned char *end = (const unsigned char *)(plan + 1);
    uint32_t sum = 2166136261u;
    for (const unsigned char *byte = (const unsigned char *)&plan->sizes; byte < end; byte++)
        sum = (sum ^ *byte) * 16777619u;
    return sum;
}

bool sv_segment_plan(const sv_segment_sizes *sizes, sv_segment *plan)
{
    if (sizes->num_workers == 0 || sizes->num_workers > SV_MAX_WORKERS || sizes->num_envs == 0 ||
        sizes->num_envs > SV_MAX_ENVS || !is_capacity(sizes->ring_capacity) ||
        !is_capacity(sizes->info_capacity) || !is_capacity(sizes->action_capacity) ||
        sizes->reserved != 0 || sizes->slab_bytes > MAX_SLAB_BYTES)
        return false;
    memset(plan, 0, sizeof *plan);
    plan->magic = SV_SEGMENT_MAGIC;
    plan->version = SV_SEGMENT_VERSION;
    plan->sizes = *sizes;
    plan->record_stride = aligned(sv_ring_bytes(sizes->ring_capacity));
    plan->info_stride = aligned(sv_byte_ring_bytes(sizes->info_capacity));
    plan->action_stride = aligned(sv_byte_ring_bytes(sizes->action_capacity));
    plan->bell = aligned(sizeof *plan);
    plan->completion = plan->bell + aligned(sizeof(sv_bell));
    plan->policy = plan->completion + aligned(sizeof(sv_completion));
    plan->notice = plan->policy + aligned(sizeof(sv_policy));
    plan->counters = plan->notice + sizeof(sv_notice);
    plan->past = plan->counters + sizes->num_workers * sizeof(sv_counters);
    plan->timings = plan->past + sizes->num_workers * sizeof(sv_counters);
    plan->texts = plan->timings + sizes->num_envs * sizeof(sv_timings);
    plan->requests = plan->texts + sizes->num_workers * sizeof(sv_text);
    plan->completions = plan->requests + sizes->num_workers * plan->record_stride;
    plan->infos = plan->completions + sizes->num_workers * plan->record_stride;
    plan->actions = plan->infos + sizes->num_workers * plan->info_stride;
    plan->slabs = plan->actions + sizes->num_workers * plan->action_stride;
    plan->total_bytes = plan->slabs + aligned(sizes->slab_bytes);
    plan->checksum = checksum(plan);
    return true;
}

void sv_segment_format(void *base, const sv_segment *plan)
{
    memcpy(base, plan, sizeof *plan);
}

bool sv_segment_open(const void *base, uint64_t mapped, sv_segment *copy)
{
    sv_segment plan;
    if (mapped < sizeof *copy)
        return false;
    memcpy(copy, base, sizeof *copy);
    return copy->magic == SV_SEGMENT_MAGIC && copy->version == SV_SEGMENT_VERSION &&
           sv_segment_plan(&copy->sizes, &plan) && memcmp(&plan, copy, sizeof plan) == 0 &&
           plan.total_bytes <= mapped;
}

void sv_segment_renew(void *base, const sv_segment *plan, uint32_t worker)
{
    sv_segment_format(base, plan); /* the worker may have damaged the header before it died */
    memset(sv_segment_requests(base, plan, worker), 0, sizeof(sv_ring_shared));
    memset(sv_segment_completions(base, plan, worker), 0, sizeof(sv_ring_shared));
    memset(sv_segment_infos(base, plan, worker), 0, sizeof(sv_ring_shared));
    memset(sv_segment_actions(base, plan, worker), 0, sizeof(sv_ring_shared));
    sv_counters *counters = sv_segment_counters(base, plan, worker);
    sv_counters_add(sv_segment_past(base, plan, worker), counters);
    memset(counters, 0, sizeof *counters);
    memset(sv_segment_text(base, plan, worker), 0, sizeof(sv_text));
}

int sv_segment_reserve(int descriptor, uint64_t bytes)
{
    if (ftruncate(descriptor, (off_t)bytes) != 0)
        return errno;
    int error;
    do
        error = posix_fallocate(descriptor, 0, (off_t)bytes);
    while (error == EINTR);
    return error;
}

int sv_segment_map(int descriptor, uint64_t bytes, void **base)
{
    struct stat status;
    if (fstat(descriptor, &status) != 0)
        return errno;
    if ((uint64_t)status.st_size < bytes) /* what lies behind the end would be SIGBUS */
        return EINVAL;
    *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return *base == MAP_FAILED ? errno : 0;
}
