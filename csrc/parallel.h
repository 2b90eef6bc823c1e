/* parallel.h — runs the turns of a loop in a few threads of C's, beside the caller, which may do other
 * work meanwhile.
 *
 * The caller begins a loop, goes on, and finishes it: it then takes turns itself, and returns when all
 * are done.  Turns are handed out by a counter, in order, to whoever is free.  Threads sleep while there
 * is no loop.  They run no Python and allocate nothing, so a fork in their midst is safe: the child has
 * none of them, and must not use what it has inherited but to free it.
 *
 * Several threads may finish a loop; one at a time begins one, and none while others finish.
 */
#ifndef SHMVEC_PARALLEL_H
#define SHMVEC_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

typedef struct sv_parallel sv_parallel;

/* One turn of a loop. */
typedef void (*sv_turn)(void *argument, size_t index);

/* Starts so many threads, maybe none; NULL: there is no memory, or no thread can be started. */
sv_parallel *sv_parallel_new(uint32_t threads);

/* Begins a loop of `count` turns; the one before is finished. */
void sv_parallel_begin(sv_parallel *parallel, sv_turn turn, void *argument, size_t count);

/* Takes part in the loop until all of its turns are done; without a loop it returns at once. */
void sv_parallel_finish(sv_parallel *parallel);

/* Finishes the loop and ends the threads. */
void sv_parallel_free(sv_parallel *parallel);

#endif
