/* pages.h — shared pages that a fork has for itself.
 *
 * What the user holds as his own array may lie in shared memory (see _core/arrays.pyx).  After a fork
 * it is two arrays, of two processes, and neither may see what the other writes; nor may a worker
 * write to it because the other process is done with it.  So before a fork its pages are copied to
 * private memory, which the fork inherits; there the copy is moved to their place, and in the
 * parent it is dropped.  (To copy no earlier than somebody writes, the kernel would have to know that
 * the memory is shared with the workers, but not with the fork: there is no such mapping.  What can
 * be had is a copy in huge pages, where a block has room for them.)
 *
 * The parent's own pages stay where they are: its other threads, which may be writing to them, and
 * devices that know their address, notice nothing.  What is written during the copy is in the fork
 * or is not, as it would be if the fork had come a moment later or sooner.
 *
 * All may be called between fork() and what pthread_atfork has it call: they are system calls, and
 * a memcpy.  No atomics: see above.
 */
#ifndef SHMVEC_PAGES_H
#define SHMVEC_PAGES_H

#include "platform.h"

/* A private copy of pages, whole ones; NULL: there is no memory. */
void *sv_pages_copy(const void *start, size_t bytes);

/* Moves a copy to the place of other pages.  Returns false if that failed: nothing was changed. */
bool sv_pages_replace(void *start, size_t bytes, void *copy);

/* Lets go of a copy that is not moved. */
void sv_pages_drop(void *copy, size_t bytes);

/* Gives the memory of shared pages back to the system, whoever has them mapped: they hold zeros,
 * and are made anew where somebody still writes.  As far as the system can; nothing depends on it.
 */
void sv_pages_give_back(void *start, size_t bytes);

#endif
