/* pages.h — gives a fork its own copy of shared memory that is lent to the user.
 *
 * Arrays that the user got may lie in shared memory (see _core/caller.pyx).  After a fork two processes
 * have each of them.  Neither may see what the other writes, and no worker may write there as soon as
 * only one of them has given it back.  So while rows of such an *area* are lent, its pages are copied
 * to private memory before a fork.  The fork inherits the copy and moves it to their place, and the
 * parent discards it.  (To copy only when a process writes, the kernel would need a mapping that is
 * shared with the workers but not with the fork, which does not exist.  The copy is in huge pages, which
 * is faster.)
 *
 * The parent's own pages stay where they are, so that other threads that write to them, and devices
 * that know their address, are not affected.  What is written during the copy may be in the fork or
 * not, as if the fork had come a moment later or sooner.
 *
 * This is done by pthread_atfork, not by Python's hooks, because C code forks, too, and other threads
 * may run between Python's hooks.  It makes only system calls, and a memcpy.
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
    _Atomic uint32_t is_common; /* whether a fork got no copy, and so shares these pages */
    struct sv_area *previous, *next;
} sv_area;

/* Gives each fork a copy of the pages of these bytes while a mark is set, until `sv_area_remove`.
 * Returns false if there is no memory. */
bool sv_area_add(sv_area *area, void *start, size_t bytes, const uint8_t *marks, size_t num_rows);

void sv_area_remove(sv_area *area);

/* Whether a fork could not be given a copy, and so shares this memory with the parent. */
bool sv_area_is_common(const sv_area *area);

#endif
