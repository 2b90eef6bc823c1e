/* tee.h — copies what other processes write into pipes to where it belongs, line by line, and keeps
 * the last of it: a worker's last words, whatever it died of.
 *
 * A worker's descriptor 2 is the writing end of such a pipe.  The reading ends are in the process
 * that has started the workers, where one thread reads all of them, passes on what comes, and
 * remembers the last SV_TEE_LAST bytes of each.
 *
 * Why the thread is in that process and not in the worker: it does not die with the worker.  What is
 * in the pipe when the worker is killed is read like everything before, so there is nothing of which
 * one would have to know how far the dead had got with it: nothing is lost, and nothing passed on
 * twice.  What a worker has started and what survives it goes on writing, without a signal SIGPIPE
 * and without being blocked: a pipe is closed when its last writer is gone, whoever that is.  And an
 * env that forks does so in a process without another thread of ours.
 *
 * The thread needs nothing of the program's: no lock but its own, no GIL, no signal (it blocks all).
 * While nobody writes it sleeps in poll(); where there is no pipe there is no thread.
 *
 * Lines stay whole: what several processes write at the same time is passed on by the line, a piece
 * that is no whole line only once it has been waiting for SV_TEE_HOLD_NS, or when somebody waits for
 * it.  A line that its target takes in pieces is brought to its end before another one begins.
 *
 * Nobody is blocked: the target is written to without waiting (by a description of its own, so that
 * O_NONBLOCK concerns nobody else).  A target that takes nothing (a pipe that nobody reads) fills
 * SV_TEE_HELD bytes here, then the pipe, and then its writers wait, as they would if they wrote to it
 * themselves; only that one's do.  What a target refuses (nobody reads it any more, the disk is full)
 * is remembered, and dropped.
 *
 * A program that closes descriptors that are not its own may open others under their numbers.  So
 * before one is used it is compared with what it was.
 *
 * A fork has no such thread, and must not read what is its parent's: sv_tee_forget is for it.  Who
 * wants no second thread about while it forks pauses this one.
 */
#ifndef SHMVEC_TEE_H
#define SHMVEC_TEE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SV_TEE_LAST 65536                /* bytes that are remembered */
#define SV_TEE_HELD (1 << 18)            /* bytes that wait for their target, at most */
#define SV_TEE_HOLD_NS INT64_C(50000000) /* that a piece of a line waits for the rest */

typedef struct sv_tee sv_tee;

/* Makes a pipe, and begins to copy what is written to its `*end` to `target`, which stays the
 * caller's; where `target` is closed or read only, what comes is only remembered.  Returns 0, or an
 * errno: there can be no more descriptors, memory or threads.  Not for two threads at once. */
int sv_tee_open(int target, sv_tee **tee, int *end);

/* The last bytes that were written before this call, `most` of them at most; returns how many. */
size_t sv_tee_last(sv_tee *tee, char *bytes, size_t most);

/* Waits until what was written before this call is passed on, or remembered and dropped.  False: the
 * target has taken nothing for so long, or somebody else's fork has. */
bool sv_tee_settle(sv_tee *tee, int64_t patience_ns);

/* The caller is done with it.  It goes once its last writer has, and all is passed on; where that is
 * so already it is gone when this returns. */
void sv_tee_close(sv_tee *tee);

/* Around a fork: the thread is gone, in the kernel's eyes, too, until as many calls of resume. */
void sv_tee_pause(void);
void sv_tee_resume(void);

/* In a fork: closes what was copied here, which is the parent's; its tees are void. */
void sv_tee_forget(void);

#endif
