/* test_pages.c — pages that are shared, and that a fork gets a copy of while they are lent. */
#include "pages.h"

#include <string.h>

#include "check.h"
#include "marks.h"

static size_t bytes;
static unsigned char *volatile before;
static uint8_t marks[2];

static bool is_all(const unsigned char *start, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (start[i] != value)
            return false;
    return true;
}

static void write_all(void *argument)
{
    (void)argument;
    unsigned char *start = before + bytes;
    CHECK(is_all(start, 4));
    memset(start, 5, bytes);
    /* the neighbours are as they were, and shared */
    CHECK(is_all(before, 1) && is_all(start + bytes, 1));
    memset(start + bytes, 6, bytes);
}

/* What is in the middle of three ranges after a fork has written to all. */
static unsigned char seen_after_a_fork(void)
{
    runner child;
    memset(before, 1, 3 * bytes);
    memset(before + bytes, 4, bytes);
    run(&child, true, write_all, NULL);
    join(&child);
    CHECK(is_all(before + 2 * bytes, 6));
    unsigned char seen = before[bytes];
    CHECK(is_all(before + bytes, seen));
    return seen;
}

static void copy_in_forks(size_t size, int rounds)
{
    sv_area area, other;
    uint8_t none[1] = {0};
    bytes = size;
    before = shared_memory(3 * bytes);
    CHECK(seen_after_a_fork() == 5); /* shared: a fork's writes are seen */
    CHECK(sv_area_add(&other, before, bytes, none, 1));
    /* whole pages, of which these bytes are parts */
    CHECK(sv_area_add(&area, before + bytes + 1, bytes - 2, marks, 2));
    for (int round = 0; round < rounds; round++) {
        CHECK(seen_after_a_fork() == 5); /* none is lent */
        sv_marks_set(marks, 1, 1);
        CHECK(seen_after_a_fork() == 4);
        sv_marks_clear(marks, 1, 1);
    }
    CHECK(!sv_area_is_common(&area));
    sv_area_remove(&other);
    sv_marks_set(marks, 0, 2);
    CHECK(seen_after_a_fork() == 4);
    sv_area_remove(&area);
    CHECK(seen_after_a_fork() == 5);
    sv_marks_clear(marks, 0, 2);
    munmap(before, 3 * bytes);
}

int main(void)
{
    start_deadline();
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    copy_in_forks(3 * page, 50);
    copy_in_forks(((size_t)5 << 20) + page, 2); /* huge pages, which the copy's place cuts up */
    return 0;
}
