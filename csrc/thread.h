/* thread.h — starts shmvec's own threads beside the program's: with small stacks and no signals.
 *
 * Signals are for the program's threads; a handler that ran on a small stack could overflow it.
 */
#ifndef SHMVEC_THREAD_H
#define SHMVEC_THREAD_H

#include <pthread.h>

/* Starts a thread, which blocks all signals; `run` gets the argument.  Returns 0 or an errno; on success
 * the caller joins or detaches it. */
int sv_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
