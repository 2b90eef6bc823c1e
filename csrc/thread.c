/* thread.c — starts a thread that no signal reaches and that needs little memory. */
#include "thread.h"

#include <errno.h>
#include <signal.h>

#define STACK_BYTES (64 * 1024) /* a poll needs little, sanitizers some more */

int sv_thread_start(pthread_t *thread, void *(*run)(void *), void *argument)
{
    pthread_attr_t small;
    sigset_t all, before;
    int error = pthread_attr_init(&small);
    if (error != 0)
        return error;
    pthread_attr_setstacksize(&small, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread inherits it */
    error = pthread_create(thread, &small, run, argument);
    if (error == EINVAL) /* libraries with many thread-local variables: these lie on the stack */
        error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    return error;
}
