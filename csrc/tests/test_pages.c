/* test_pages.c — pages that are private during a fork, and shared again afterwards. */
#include "pages.h"

#include <string.h>

#include "check.h"

static size_t bytes;

static void write_all(void *argument)
{
    memset(argument, 3, bytes);
}

static bool is_all(const unsigned char *start, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (start[i] != value)
            return false;
    return true;
}

int main(void)
{
    start_deadline();
    bytes = 3 * (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *before = shared_memory(3 * bytes);
    unsigned char *start = before + bytes;
    memset(before, 1, 3 * bytes);
    runner child;

    run(&child, true, write_all, start); /* shared: a fork's writes are seen */
    join(&child);
    CHECK(is_all(start, 3));

    void *aside = sv_pages_make_private(start, bytes);
    CHECK(aside != NULL && is_all(start, 3) && is_all(aside, 3));
    memset(start, 4, bytes);
    CHECK(is_all(aside, 3));
    run(&child, true, write_all, start); /* private: they are not */
    join(&child);
    CHECK(is_all(start, 4));
    run(&child, true, write_all, aside); /* nor is what was put aside lost */
    join(&child);
    CHECK(is_all(start, 4));

    CHECK(sv_pages_make_shared(start, bytes, aside));
    CHECK(is_all(start, 3));
    memset(start, 5, bytes);
    run(&child, true, write_all, start);
    join(&child);
    CHECK(is_all(start, 3));
    CHECK(is_all(before, 1) && is_all(before + 2 * bytes, 1)); /* the neighbours are as they were */

    for (int round = 0; round < 100; round++) {
        aside = sv_pages_make_private(start, bytes);
        CHECK(aside != NULL && sv_pages_make_shared(start, bytes, aside));
    }
    aside = sv_pages_make_private(start, bytes);
    CHECK(aside != NULL);
    sv_pages_drop(aside, bytes); /* private for good */
    CHECK(is_all(start, 3));
    sv_pages_give_back(before, bytes);
    CHECK(is_all(before, 0) && is_all(start, 3) && is_all(before + 2 * bytes, 1));
    return 0;
}
