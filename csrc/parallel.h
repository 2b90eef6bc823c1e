/* parallel.h — runs the turns of a loop in a few threads, while the caller may do other work.
 *
 * The caller begins a loop, does other work, and finishes the loop: it then takes turns itself, and
 * returns when all are done.  A counter hands out the turns, in order, to any thread that is free.
 * Threads sleep while there is no loop.  They run no Python and allocate nothing, so a fork at any
 * moment is safe: the child has none of the threads, and may only free what it has inherited.
 *
 * Several threads may finish a loop.  Only one at a time may begin one, and none while others finish.
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
