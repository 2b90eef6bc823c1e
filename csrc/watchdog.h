/* watchdog.h — ends this process and its family when the parent is gone, whatever they are doing.
 *
 * A worker that waits for requests checks its parent between two slices.  A worker inside env.step
 * cannot: it may hold the GIL in a loop of C, or be deep in a simulator.  So a thread checks.  It sleeps
 * in poll() on a pidfd of the parent, costs nothing while the parent lives, and takes no lock that
 * another thread holds.  When the parent is gone it kills the processes that the env has started, by
 * their mark (family.h).  Then it sends SIGKILL to the process group if this process leads it, as a
 * worker does.  Otherwise the group belongs to another process, and only this process is killed.
 *
 * Why a pidfd: it always means the same process, also after its number is used again, and also if
 * that process is not the one that forked us (a fork server did).  It is ready once all threads of
 * the process are gone, reaped or not.
 *
 * Why not PR_SET_PDEATHSIG: it follows the thread that forked, not the process.  A vector env made
 * in a thread that ends would lose its workers, and with a fork server it watches the wrong process.
 *
 * Why not a timer and a signal handler: the signal would interrupt the env's system calls 20 times a
 * second, and an env may block or take over any signal.  The thread blocks all signals, so none is
 * delivered to it in place of the env's own threads.
 *
 * Why a thread and not another process: it cannot outlive the worker, or be killed alone.
 *
 * Only the calling thread survives a fork(), so a child has no watchdog.  It needs none, because it is
 * killed as a member of the group.  A process that must have no second thread while it forks stops the
 * watchdog before and starts it after; if the parent ends in between, the start finds that out.
 *
 * An env may close descriptors that are not its own, and the number of the pidfd may come to mean
 * another file.  So the thread has a descriptor table of its own (close_range with UNSHARE) with only
 * the pidfd, and keeps no pipe open.  Before Linux 5.9 the table is shared; a watchdog that finds its
 * pidfd gone then ends without killing.
 */
#ifndef SHMVEC_WATCHDOG_H
#define SHMVEC_WATCHDOG_H

#include <stdint.h>

/* Starts watching the process of a pidfd, which the caller keeps open until the stop.  `mark` is that
 * of this process's family.
 * Returns 0 or an errno: EBADF if it is no pidfd, EBUSY if a watchdog runs, EAGAIN if there can be
 * no more threads. */
int sv_watchdog_start(int parent_pidfd, uint64_t mark);

/* Stops watching.  When this returns, the thread is also gone in /proc, where Python counts threads
 * to warn of forks.  Does nothing if no watchdog was started, or in a child of the process that has
 * started it.  Two threads must not call this at once. */
void sv_watchdog_stop(void);

#endif
