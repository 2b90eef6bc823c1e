/* pages.c — see pages.h. */
#include "pages.h"

#include <string.h>
#include <sys/mman.h>

void *sv_pages_copy(const void *start, size_t bytes)
{
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return NULL;
    (void)madvise(copy, bytes, MADV_HUGEPAGE); /* most of the time goes into page faults */
    return memcpy(copy, start, bytes);
}

bool sv_pages_replace(void *start, size_t bytes, void *copy)
{
    return mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, start) != MAP_FAILED;
}

void sv_pages_drop(void *copy, size_t bytes)
{
    munmap(copy, bytes);
}

void sv_pages_give_back(void *start, size_t bytes)
{
    (void)madvise(start, bytes, MADV_REMOVE);
}
