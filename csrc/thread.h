/* thread.h — threads of ours beside the program's own: small, and deaf to signals.
 *
 * What comes as a signal is for the program's threads; a handler on a small stack would end it all.
 */
#ifndef SHMVEC_THREAD_H
#define SHMVEC_THREAD_H

#include <pthread.h>

/* Starts a thread, which blocks all signals; `run` gets NULL.  Returns 0 or an errno; on success the
 * caller joins or detaches it. */
int sv_thread_start(pthread_t *thread, void *(*run)(void *));

#endif
