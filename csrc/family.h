/* family.h — what a worker has started, and what that has started: known by a mark, ended with it.
 *
 * Envs start processes: games, simulators, X servers, loggers, pools of their own.  They must go
 * when their worker goes, and a worker may go without a word.  So its family is known by what
 * anybody can read of a process and every descendant inherits: a resource limit.  The worker sets
 * its soft RLIMIT_LOCKS to a random number from 2^62 up, the mark.  Linux has not heeded that limit
 * since 2.4.25, and nothing sets it.  It goes through fork and exec, setsid, a double fork, an empty
 * environment, a change of the title.  One system call reads that of another process, so all
 * processes are passed over in less than a millisecond.  A descendant that is to live on sets its
 * limit anew, to any other value.
 *
 * What escapes: a process with another user or group than ours (setuid, setgid), of which we may
 * not read the limit; all, where somebody has lowered the hard limit below 2^62.  These go if they
 * are in the worker's process group, which is killed as well.
 *
 * Why not a variable in the environment: one that is forked without exec shows that of whatever was
 * executed last, before the worker was; and it can be cleared or written over.
 *
 * Why not PR_SET_CHILD_SUBREAPER: with it the worker would get all orphans as its children, as
 * zombies in the end, and cannot tell them from the env's own, whose status is the env's to fetch.
 * It would have to leave them all, and thousands of short-lived ones would fill the table of
 * processes.  It is of no use, too, when the worker itself dies first.
 *
 * Nobody else is ever hit: a signal is sent through a pidfd, and only if the number that it was
 * opened by belongs to a marked process before and after.  If it has changed hands in between, the
 * pidfd means a process that is gone.
 *
 * A worker inside a family (a nested vector env) has a mark of its own in place of the outer one:
 * its parent's end is what ends it and its family, by its watchdog.
 *
 * Nothing here allocates, takes a lock, or needs the GIL: the watchdog is a caller.
 */
#ifndef SHMVEC_FAMILY_H
#define SHMVEC_FAMILY_H

#include <stdint.h>
#include <sys/types.h>

/* Marks this process, and so what it starts from now on.  Returns 0 or an errno: EINVAL where the
 * hard limit is too low.  The mark is a number of 2^62 or more, and below 2^63. */
int sv_family_lead(uint64_t mark);

/* Sends a signal (0: none) to every process with one of these marks but this one and `spared`.
 * Returns how many there were that have not ended.  They may start others meanwhile: if it has not
 * found any it looks once more, and nobody is left when it returns 0. */
uint32_t sv_family_signal(const uint64_t *marks, uint32_t count, int number, pid_t spared);

/* Kills every process with this mark but this one.  It comes back after half a second at the latest,
 * though some may hang in the kernel. */
void sv_family_kill(uint64_t mark);

#endif
