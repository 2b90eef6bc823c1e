/* handler.h — a wrapper around another library's signal handler that makes it safe at any moment.
 *
 * CPython's faulthandler.register installs a handler that writes stacks to a descriptor (3.10 to 3.14).
 * The wrapper adds what that handler lacks:
 *
 * - It restores errno.  A handler may run between a failed system call and the check of errno.  If it
 *   changed errno there, "interrupted", after which a caller retries, would become an error that the
 *   caller does not expect.
 * - It only writes to the given file.  An env may close descriptors that are not its own, and open
 *   another file under the same number, and a signal that was blocked arrives later.
 * - It runs in the process's first thread, which runs the envs.  Another thread that receives the
 *   signal passes it on.
 * - It does not read a stack in the middle of a change.  CPython 3.11 and 3.12 count a call from C
 *   at the beginning of their interpreter's function, and store the called frame some instructions
 *   later.  In between the frame pointer refers to old memory: the frame of a call that has ended, one
 *   far below, or an address that cannot be read.  Faulthandler would show another stack, or crash.
 * - It ends its output with a zero byte, so that the reader knows that all was written.  If only a
 *   byte 1 precedes it, the stack was in the middle of a change, and the next attempt works.
 * - It empties a file that has become long, because readers, which may be root, write nothing.
 */
#ifndef SHMVEC_HANDLER_H
#define SHMVEC_HANDLER_H

#include <stddef.h>

/* Wraps the present handler of a signal, which writes to `descriptor`, and keeps its flags and mask.
 * The inner handler is not called while the first thread runs the first `bytes` bytes of `code` (as
 * far as that is known: on x86_64 and aarch64).  There is one wrapper in a process: it wraps the
 * handler of each signal for which this is called, with the last descriptor and the last code.
 * Returns 0 or an errno; EINVAL: the signal has no handler, or one with three arguments
 * (SA_SIGINFO). */
int sv_handler_guard(int number, int descriptor, const void *code, size_t bytes);

#endif
