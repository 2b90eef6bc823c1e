/* pages.c — see pages.h. */
#include "pages.h"

#include <string.h>
#include <sys/mman.h>

void *sv_pages_make_private(void *start, size_t bytes)
{
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return NULL;
    /* An old size of 0: a second mapping of the same shared pages. */
    void *aside = mremap(start, 0, bytes, MREMAP_MAYMOVE);
    if (aside == MAP_FAILED) {
        munmap(copy, bytes);
        return NULL;
    }
    memcpy(copy, start, bytes);
    if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, start) == MAP_FAILED) {
        munmap(copy, bytes);
        munmap(aside, bytes);
        return NULL;
    }
    return aside;
}

bool sv_pages_make_shared(void *start, size_t bytes, void *aside)
{
    return mremap(aside, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, start) != MAP_FAILED;
}

void sv_pages_drop(void *aside, size_t bytes)
{
    munmap(aside, bytes);
}

void sv_pages_give_back(void *start, size_t bytes)
{
    (void)madvise(start, bytes, MADV_REMOVE);
}
