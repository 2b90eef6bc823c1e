/* test_pages.c — pages that are shared, and that a fork gets a copy of. */
#include "pages.h"

#include <string.h>

#include "check.h"

static size_t bytes;
static void *copy;

static bool is_all(const unsigned char *start, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (start[i] != value)
            return false;
    return true;
}

static void write_all(void *argument)
{
    memset(argument, 3, bytes);
}

static void write_to_copy(void *argument)
{
    unsigned char *start = argument;
    CHECK(sv_pages_replace(start, bytes, copy));
    CHECK(is_all(start, 4));
    memset(start, 5, bytes);
    CHECK(is_all(start, 5));
    /* the neighbours are as they were */
    CHECK(is_all(start - bytes, 1) && is_all(start + bytes, 1));
    memset(start + bytes, 6, bytes);
}

/* Pages of a size get copies of their own in a fork, round by round. */
static void copy_in_forks(size_t size, int rounds)
{
    bytes = size;
    unsigned char *before = shared_memory(3 * bytes);
    unsigned char *start = before + bytes;
    runner child;
    for (int round = 0; round < rounds; round++) {
        memset(before, 1, 3 * bytes);
        memset(start, 4, bytes);
        copy = sv_pages_copy(start, bytes);
        CHECK(copy != NULL && is_all(copy, 4));
        memset(start, 7, bytes); /* not seen in the fork */
        run(&child, true, write_to_copy, start);
        join(&child);
        sv_pages_drop(copy, bytes);
        CHECK(is_all(start, 7));
        CHECK(is_all(start + bytes, 6)); /* the neighbours are shared */
    }
    sv_pages_give_back(before, bytes);
    CHECK(is_all(before, 0) && is_all(start, 7) && is_all(start + bytes, 6));
}

int main(void)
{
    start_deadline();
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    bytes = 3 * page;
    unsigned char *start = shared_memory(bytes);
    runner child;
    run(&child, true, write_all, start); /* shared: a fork's writes are seen */
    join(&child);
    CHECK(is_all(start, 3));

    copy_in_forks(3 * page, 100);
    copy_in_forks(((size_t)5 << 20) + page, 2); /* huge pages, which the copy's place cuts up */
    return 0;
}
