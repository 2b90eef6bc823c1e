/* pages.c — see pages.h. */
#include "pages.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "marks.h"

static sv_area *areas;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static bool registered;

static bool is_lent(const sv_area *area)
{
    for (size_t row = 0; row < area->num_rows; row++)
        if (sv_is_marked(area->marks, row))
            return true;
    return false;
}

static void *copy_pages(const sv_area *area)
{
    void *copy =
        mmap(NULL, area->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return NULL;
    (void)madvise(copy, area->bytes, MADV_HUGEPAGE); /* most of the time goes into page faults */
    return memcpy(copy, area->start, area->bytes);
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
    for (sv_area *area = areas; area != NULL; area = area->next) {
        if (!is_lent(area))
            continue;
        area->copy = copy_pages(area);
        if (area->copy == NULL)
            /* relaxed: a flag, which guards nothing else. */
            atomic_store_explicit(&area->is_common, 1, memory_order_relaxed);
    }
}

static void after_fork(bool in_child)
{
    for (sv_area *area = areas; area != NULL; area = area->next) {
        if (area->copy == NULL)
            continue;
        if (!in_child
            || mremap(area->copy, area->bytes, area->bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                      area->start)
                   == MAP_FAILED)
            munmap(area->copy, area->bytes);
        area->copy = NULL;
    }
    pthread_mutex_unlock(&lock);
}

static void in_parent(void)
{
    after_fork(false);
}

static void in_child(void)
{
    after_fork(true);
}

bool sv_area_add(sv_area *area, void *start, size_t bytes, const uint8_t *marks, size_t num_rows)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)start / page * page;
    uintptr_t end = ((uintptr_t)start + bytes + page - 1) / page * page;
    *area = (sv_area){.start = (char *)begin, .bytes = end - begin, .marks = marks,
                      .num_rows = num_rows};
    pthread_mutex_lock(&lock);
    registered = registered || pthread_atfork(before_fork, in_parent, in_child) == 0;
    if (registered) {
        area->next = areas;
        if (areas != NULL)
            areas->previous = area;
        areas = area;
    }
    pthread_mutex_unlock(&lock);
    return registered;
}

void sv_area_remove(sv_area *area)
{
    pthread_mutex_lock(&lock);
    if (area->previous != NULL)
        area->previous->next = area->next;
    else
        areas = area->next;
    if (area->next != NULL)
        area->next->previous = area->previous;
    pthread_mutex_unlock(&lock);
}

bool sv_area_is_common(const sv_area *area)
{
    return atomic_load_explicit(&area->is_common, memory_order_relaxed) != 0;
}
