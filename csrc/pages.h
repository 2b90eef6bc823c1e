/* pages.h — shared pages that this process has for itself while a fork may look at them.
 *
 * What the user holds as his own array may lie in shared memory (see _core/pool.pyx).  After a fork
 * it is two arrays, of two processes, and neither may see what the other writes; nor may a worker
 * write to it because the other process is done with it.  So before a fork its pages are made
 * private: a copy is moved to their place, which the fork then copies on write as it does any other
 * memory.  The shared pages are kept mapped elsewhere, aside, and are moved back when they are
 * wanted again.
 *
 * A mapping is exchanged by one mremap, under the kernel's lock of the address space: other threads
 * that look at the array meanwhile see the one or the other, and never nothing.  What such a thread
 * writes during the copy may be lost: whoever forks does so between his own writes.
 *
 * No atomics: whoever calls has the array to himself, but for readers.
 */
#ifndef SHMVEC_PAGES_H
#define SHMVEC_PAGES_H

#include "platform.h"

/* Makes shared pages, whole ones, private, with what they hold.  Returns where the shared ones are
 * now, or NULL: nothing was changed, there is no memory. */
void *sv_pages_make_private(void *start, size_t bytes);

/* Moves the shared pages back.  Returns false if that failed: nothing was changed. */
bool sv_pages_make_shared(void *start, size_t bytes, void *aside);

/* Lets go of shared pages that are not moved back. */
void sv_pages_drop(void *aside, size_t bytes);

/* Gives the memory of shared pages back to the system, whoever has them mapped: they hold zeros,
 * and are made anew where somebody still writes.  As far as the system can; nothing depends on it.
 */
void sv_pages_give_back(void *start, size_t bytes);

#endif
