/* pages.h — shared memory of which a fork gets a copy of its own.
 *
 * Observations that the user got as his own arrays may lie in shared memory (see _core/frames.pyx).
 * After a fork each of them is two arrays, of two processes: neither may see what the other writes,
 * and no worker may write to it because the other process is done with it.  So while rows of such an
 * *area* are lent, its pages are copied to private memory before a fork; the fork inherits that and
 * moves it to their place, and the parent drops it.  (To copy no earlier than a process writes, the
 * kernel would have to know that the memory is shared with the workers, but not with the fork: there
 * is no such mapping.  What can be had is a copy in huge pages.)
 *
 * The parent's own pages stay where they are: its other threads, which may be writing to them, and
 * devices that know their address, notice nothing.  What is written during the copy is in the fork
 * or is not, as it would be if the fork had come a moment later or sooner.
 *
 * This is done by pthread_atfork, not by Python's hooks: C code forks, too, and between Python's hooks
 * other threads may run.  All that runs there are system calls, and a memcpy.
 */
#ifndef SHMVEC_PAGES_H
#define SHMVEC_PAGES_H

#include "platform.h"

typedef struct sv_area {
    char *start; /* whole pages */
    size_t bytes;
    const uint8_t *marks; /* of the rows that are lent: marks.h */
    size_t num_rows;
    void *copy;            /* for the fork that is being made; NULL: none */
    _Atomic uint32_t both; /* a fork could get no copy: both processes have these pages for ever */
    struct sv_area *before, *after;
} sv_area;

/* Has forks get copies of the pages in which these bytes lie, while a mark is set, until
 * `sv_area_remove`.  Returns false if there is no memory. */
bool sv_area_add(sv_area *area, void *start, size_t bytes, const uint8_t *marks, size_t num_rows);

void sv_area_remove(sv_area *area);

/* Whether a fork could not be given a copy, and so has this memory in common with the parent. */
bool sv_area_is_common(const sv_area *area);

#endif
