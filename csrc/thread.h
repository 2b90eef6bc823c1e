/* thread.h — starts threads of shmvec's own, with small stacks and no signals.
 *
 * Signals are for the program's threads, and a handler could overflow a small stack.
 */
#ifndef SHMVEC_THREAD_H
#define SHMVEC_THREAD_H

#include <pthread.h>

/* Starts a thread, which blocks all signals; `run` gets the argument.  Returns 0 or an errno; on success
 * the caller joins or detaches it. */
int sv_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
