/* family.h — finds the processes that a worker and its children have started, its *family*, by a mark,
 * and ends them with the worker.
 *
 * Envs start processes: games, simulators, X servers, loggers, pools of their own.  These must end
 * when their worker ends, which may happen without notice.  So each member of the family carries a mark
 * that other processes can read and that every descendant inherits: a resource limit.  The worker sets
 * its soft RLIMIT_LOCKS to the mark, a random number of at least 2^62.  Linux has ignored that limit
 * since 2.4.25, and nothing else sets it.  It survives fork and exec, setsid, a double fork, an empty
 * environment, a change of the title.  One system call reads the limit of another process, so a scan
 * of all processes takes less than a millisecond.  A descendant that should live on sets its limit to
 * any other value.
 *
 * What escapes: processes with another user or group than ours (setuid, setgid), whose limit we may
 * not read; and all processes if the hard limit was lowered below 2^62.  They still end if they are in
 * the worker's process group, which is killed, too.
 *
 * Why not a variable in the environment: a process that was forked without exec shows the environment
 * of the last exec, before the worker's; and a variable can be cleared or overwritten.
 *
 * Why not PR_SET_CHILD_SUBREAPER: with it the worker would get all orphans as its children, and in
 * the end as zombies.  It could not distinguish them from the env's own children, whose status only
 * the env may fetch, so it would have to leave them all, and thousands of short-lived ones would fill
 * the table of processes.  It also does not help when the worker itself dies first.
 *
 * No other process is ever hit: a signal is sent through a pidfd, and only if the process id by which
 * it was opened belongs to a marked process before and after.  If the id was reused in between, the
 * pidfd means a process that is gone.
 *
 * A worker inside a family (a nested vector env) has a mark of its own in place of the outer one: its
 * watchdog ends it and its family when its parent ends.
 *
 * Nothing here allocates, takes a lock, or needs the GIL, since the watchdog calls it.
 */
#ifndef SHMVEC_FAMILY_H
#define SHMVEC_FAMILY_H

#include <stdint.h>
#include <sys/types.h>

/* Marks this process, and so what it starts from now on.  Returns 0 or an errno: EINVAL where the
 * hard limit is too low.  The mark is a number of 2^62 or more, and below 2^63. */
int sv_family_lead(uint64_t mark);

/* Sends a signal (0: none) to every process with one of these marks except this one and `spared`.
 * Returns how many of them have not ended.  They may start others meanwhile, so after a scan that finds
 * none it scans once more: none is left when it returns 0. */
uint32_t sv_family_signal(const uint64_t *marks, uint32_t count, int number, pid_t spared);

/* If this process gets orphans as its children (process 1 of a container, a subreaper), waits for all
 * children with one of these marks that have ended.  Otherwise they would stay as zombies.  A worker
 * that is its child is one of them until it was waited for. */
void sv_family_reap(const uint64_t *marks, uint32_t count);

/* Kills every process with this mark except this one.  Returns after half a second at the latest,
 * even if some hang in the kernel. */
void sv_family_kill(uint64_t mark);

#endif
