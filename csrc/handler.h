/* handler.h — a signal's handler of somebody else's, made fit for being called at any moment.
 *
 * CPython's faulthandler.register has a handler that writes stacks to a descriptor (3.10 to 3.14).
 * What it lacks one around it has:
 *
 * - errno stays as it was.  A handler may run between a system call that has failed and the look at
 *   errno.  One that changes it there makes of "interrupted", after which one tries again, an error
 *   that nobody expects.
 * - It writes to no other file than the one that it was given.  An env may close descriptors that are
 *   not its own, and open a file of its own under the number; what is asked for comes later where the
 *   signal was blocked.
 * - It runs in the process's first thread, which runs the envs, whichever thread the signal was
 *   brought to: that one passes it on.
 * - It does not look at a stack in the midst of a change.  CPython 3.11 and 3.12 count a call of C's
 *   in where their interpreter's function begins, and note what is called some instructions later.
 *   Meanwhile what lies there counts: a dead call's frame, one far below, or what cannot be read.
 *   Faulthandler would show another stack, or crash.
 * - Who reads can tell that all was written: a zero byte follows.  Before it a byte 1 alone says that
 *   the moment was such a one; the next is not.
 */
#ifndef SHMVEC_HANDLER_H
#define SHMVEC_HANDLER_H

#include <stddef.h>

/* Puts one around the handler that a signal has now, which writes to `descriptor`, with the flags and
 * the mask that it has.  That one is not called while the first thread runs the first so many bytes of
 * `code` (as far as is known: on x86_64 and aarch64).  One of a process: it is around the handler of
 * each signal for which this is called, and knows the last descriptor and the last code.  Returns 0 or
 * an errno; EINVAL: the signal has no handler, or one that wants to know more (SA_SIGINFO). */
int sv_handler_guard(int number, int descriptor, const void *code, size_t bytes);

#endif
