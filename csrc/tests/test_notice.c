/* test_notice.c — an onlooker that sees a vector env open sees whose it is, and each fault by name. */
#include "notice.h"

#include "check.h"

#include <string.h>

struct shared {
    sv_notice notice;
    uint32_t rounds;
};

static void test_faults(void)
{
    static sv_notice notice;
    uint64_t count = 0;
    CHECK(strcmp(sv_fault_lines[0].name, "crashes") == 0);
    for (const sv_counter_line *line = sv_fault_lines; line->name != NULL; line++)
        sv_counter_set(sv_counter_at(&notice, line), ++count);
    CHECK(sv_counter_get(&notice.crashes) == 1 && sv_counter_get(&notice.resets) == 5);
    CHECK(sv_notice_state(&notice) == SV_NOTICE_NOT_YET);
}

/* Waits of which each counts one, and begins when as many were counted. */
static void wait_often(void *argument)
{
    struct shared *shared = argument;
    sv_counts counts = {0};
    sv_notice_open(&shared->notice, 77, 3);
    for (uint32_t round = 0; round < shared->rounds; round++) {
        sv_notice_begin_wait(&shared->notice, round);
        counts.waits++;
        sv_counters_publish(&shared->notice.parent, &counts);
        sv_notice_end_wait(&shared->notice);
    }
    sv_notice_close(&shared->notice);
}

static void test_reader(bool process, uint32_t rounds)
{
    struct shared *shared = shared_memory(sizeof *shared);
    sv_notice *notice = &shared->notice;
    runner writer;
    uint64_t state;
    int64_t elapsed;
    shared->rounds = rounds;
    run(&writer, process, wait_often, shared);
    do {
        state = sv_notice_state(notice);
        if (state != SV_NOTICE_NOT_YET) {
            CHECK(sv_counter_get(&notice->parent.process) == 77);
            CHECK(sv_counter_get(&notice->num_processes) == 3 && sv_counter_get(&notice->began) != 0);
        }
        if (sv_busy_for(&notice->parent.activity, rounds, &elapsed) != 0)
            CHECK(elapsed > 0 && elapsed <= rounds);
    } while (state != SV_NOTICE_CLOSED);
    CHECK(sv_counter_get(&notice->parent.waits) == rounds);
    join(&writer);
    munmap(shared, sizeof *shared);
}

int main(int argc, char **argv)
{
    uint32_t rounds = rounds_of(argc, argv, 300000);
    start_deadline();
    test_faults();
    test_reader(false, rounds);
    test_reader(true, rounds);
    return 0;
}
