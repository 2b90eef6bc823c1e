/* handler.h — a signal's handler that leaves errno as it was.
 *
 * A handler may run between a system call that has failed and the look at errno.  One that changes it
 * there makes of "interrupted", after which one tries again, an error that nobody expects.  CPython's
 * faulthandler.register has such a handler, where it calls no other one (3.10 to 3.14).
 */
#ifndef SHMVEC_HANDLER_H
#define SHMVEC_HANDLER_H

/* Has the handler that a signal has now be called by one that keeps errno, with the flags and the mask
 * that it has.  One of a process: it is the handler of each signal for which this is called.  Returns 0
 * or an errno; EINVAL: the signal has none, or one that wants to know more (SA_SIGINFO). */
int sv_handler_keep_errno(int number);

#endif
