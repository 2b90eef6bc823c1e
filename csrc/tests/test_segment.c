/* test_segment.c — the layout is aligned and disjoint; a damaged header is refused. */
#include "segment.h"
#include "check.h"

#include <fcntl.h>

static const sv_segment_sizes SIZES = {.num_workers = 3,
                                       .num_envs = 7,
                                       .ring_capacity = 64,
                                       .info_capacity = 4096,
                                       .action_capacity = 256,
                                       .slab_bytes = 1000};

static void test_plan(void)
{
    sv_segment plan;
    CHECK(sv_segment_plan(&SIZES, &plan));
    const uint64_t offsets[] = {0,          sizeof plan,  plan.bell,       plan.completion,
                                plan.notice, plan.counters, plan.past, plan.timings, plan.texts, plan.requests, plan.completions, plan.infos, plan.actions, plan.slabs,
                                plan.total_bytes};
    for (size_t i = 1; i < sizeof offsets / sizeof *offsets; i++)
        CHECK(offsets[i] > offsets[i - 1]);
    for (size_t i = 2; i < sizeof offsets / sizeof *offsets; i++)
        CHECK(offsets[i] % SV_CACHE_LINE == 0);
    CHECK(plan.record_stride % SV_CACHE_LINE == 0 && plan.info_stride % SV_CACHE_LINE == 0);
    CHECK(plan.timings + 7 * sizeof(sv_timings) == plan.texts);
    CHECK(plan.texts + 3 * sizeof(sv_text) == plan.requests);
    CHECK(plan.requests + 3 * plan.record_stride == plan.completions);
    CHECK(plan.infos + 3 * plan.info_stride == plan.actions);
    CHECK(plan.actions + 3 * plan.action_stride == plan.slabs);
    CHECK(plan.total_bytes >= plan.slabs + 1000);
}

static void test_bad_sizes(void)
{
    sv_segment plan;
    sv_segment_sizes bad;
#define REFUSED(field, value)                                                                     \
    bad = SIZES;                                                                                  \
    bad.field = value;                                                                            \
    CHECK(!sv_segment_plan(&bad, &plan))
    REFUSED(num_workers, 0);
    REFUSED(num_workers, SV_MAX_WORKERS + 1);
    REFUSED(num_envs, 0);
    REFUSED(num_envs, SV_MAX_ENVS + 1);
    REFUSED(ring_capacity, 0);
    REFUSED(ring_capacity, 100);
    REFUSED(ring_capacity, UINT32_C(1) << 31);
    REFUSED(info_capacity, 4097);
    REFUSED(info_capacity, 32);
    REFUSED(action_capacity, 100);
    REFUSED(reserved, 1);
    REFUSED(slab_bytes, UINT64_MAX);
    bad = SIZES; /* the largest that is allowed must not overflow */
    bad.num_workers = SV_MAX_WORKERS;
    bad.ring_capacity = bad.info_capacity = 1u << 30;
    bad.slab_bytes = UINT64_C(1) << 46;
    CHECK(sv_segment_plan(&bad, &plan) && plan.total_bytes < UINT64_C(1) << 56);
}

static void test_open(void)
{
    sv_segment plan, copy;
    CHECK(sv_segment_plan(&SIZES, &plan));
    unsigned char *base = shared_memory(plan.total_bytes);
    CHECK(!sv_segment_open(base, plan.total_bytes, &copy)); /* all zero */
    sv_segment_format(base, &plan);
    CHECK(sv_segment_open(base, plan.total_bytes, &copy));
    CHECK(memcmp(&plan, &copy, sizeof plan) == 0);
    CHECK(!sv_segment_open(base, plan.total_bytes - 1, &copy));
    CHECK(!sv_segment_open(base, 10, &copy));
    /* Any flipped bit of the header is noticed. */
    for (size_t bit = 0; bit < sizeof plan * 8; bit++) {
        base[bit / 8] ^= (unsigned char)(1u << bit % 8);
        CHECK(!sv_segment_open(base, plan.total_bytes, &copy));
        base[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    CHECK(sv_segment_open(base, plan.total_bytes, &copy));
    /* Rings lie where the plan says, each worker's its own. */
    CHECK((char *)sv_segment_requests(base, &plan, 1) - (char *)base ==
          (ptrdiff_t)(plan.requests + plan.record_stride));
    CHECK((char *)sv_segment_infos(base, &plan, 2) - (char *)base ==
          (ptrdiff_t)(plan.infos + 2 * plan.info_stride));
    CHECK((char *)sv_segment_actions(base, &plan, 1) - (char *)base ==
          (ptrdiff_t)(plan.actions + plan.action_stride));
    munmap(base, plan.total_bytes);
}

/* A worker's successor begins anew, and what was done before is kept. */
static void test_renew(void)
{
    sv_segment plan;
    CHECK(sv_segment_plan(&SIZES, &plan));
    void *base = shared_memory(plan.total_bytes);
    sv_counters *counters = sv_segment_counters(base, &plan, 1);
    sv_counts counts = {.steps = 5, .late = 2};
    const sv_counters *past = sv_segment_past(base, &plan, 1);
    sv_counter_set(&sv_segment_past(base, &plan, 1)->num_envs, 3);
    for (int round = 1; round <= 2; round++) {
        sv_counters_publish(counters, &counts);
        sv_counter_set(&counters->cpu_ns, 9);
        sv_counter_set(&counters->process, 77);
        sv_text_publish(sv_segment_text(base, &plan, 1), "about it", 8);
        sv_segment_renew(base, &plan, 1);
        CHECK(sv_counter_get(&counters->steps) == 0 && sv_counter_get(&counters->process) == 0);
        CHECK(sv_counter_get(&counters->cpu_ns) == 0);
        CHECK(sv_text_length(sv_segment_text(base, &plan, 1)) == 0);
        CHECK(sv_counter_get(&sv_segment_past(base, &plan, 1)->num_envs) == 3);
        CHECK(sv_counter_get(&past->steps) == 5 * (uint64_t)round);
        CHECK(sv_counter_get(&past->late) == 2 * (uint64_t)round);
        CHECK(sv_counter_get(&past->resets) == 0);
    }
    CHECK(sv_counter_get(&sv_segment_past(base, &plan, 0)->steps) == 0);
    CHECK(sv_segment_head_bytes(&plan) == plan.texts + 3 * sizeof(sv_text));
    munmap(base, plan.total_bytes);
}

static void test_reserve(void)
{
    char name[] = "/tmp/shmvec-test-XXXXXX";
    int descriptor = mkstemp(name);
    CHECK(descriptor >= 0 && unlink(name) == 0);
    CHECK(sv_segment_reserve(descriptor, 100000) == 0);
    CHECK(lseek(descriptor, 0, SEEK_END) == 100000);
    CHECK(close(descriptor) == 0);
    CHECK(sv_segment_reserve(-1, 100) == EBADF);
}

int main(void)
{
    start_deadline();
    test_plan();
    test_bad_sizes();
    test_open();
    test_renew();
    test_reserve();
    return 0;
}
