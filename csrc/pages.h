/* pages.h — gives a fork its own copy of shared memory that is lent to the user.
 *
 * Observations that the user got as arrays of his own may lie in shared memory (see
 * _core/caller.pyx).  After a fork each of them is two arrays, of two processes: neither process may
 * see what the other writes, and no worker may write there because one of them has given it back.
 * So while rows of such an *area* are lent, its pages are copied to private memory before a fork; the
 * fork inherits the copy and moves it to their place, and the parent discards it.  (To copy only when
 * a process writes, the kernel would need a mapping that is shared with the workers, but not with the
 * fork: there is none.  The copy is in huge pages, which is faster.)
 *
 * The parent's own pages stay where they are: other threads that write to them, and devices that know
 * their address, are not affected.  What is written during the copy may be in the fork or not, as if
 * the fork had come a moment later or sooner.
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
    void *copy;            /* the copy for the fork that is being made; NULL: none */
    _Atomic uint32_t both; /* whether a fork got no copy: then both processes share these pages */
    struct sv_area *before, *after;
} sv_area;

/* From now on, while a mark is set, a fork gets a copy of the pages in which these bytes lie; until
 * `sv_area_remove`.  Returns false if there is no memory. */
bool sv_area_add(sv_area *area, void *start, size_t bytes, const uint8_t *marks, size_t num_rows);

void sv_area_remove(sv_area *area);

/* Whether a fork could not be given a copy, and so shares this memory with the parent. */
bool sv_area_is_common(const sv_area *area);

#endif
