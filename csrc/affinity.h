/* affinity.h — binds a sleeper to one core, on which it is then woken, only during the sleep (wait.h
 * says when that pays).
 *
 * The scheduler follows the thread's own affinity, so the affinity before the sleep must be restored
 * afterwards, and that is more than the cores that were seen.  The kernel keeps two masks: the
 * cpuset, which administrators change while we run (a container gets more cores), and the mask that
 * was requested, if any.  A thread may use what both have in common.  (As long as they have nothing in
 * common, it may use the whole cpuset.  Before Linux 6.2 a change of the cpuset discards the requested
 * mask.)  A thread that requests only the cores that it saw never gets those that are added later.
 *
 * So a thread that may use every core requests all of them: of a mask with all bits set the kernel
 * takes the cores that exist now, and adds those that come.  A try shows whether it may: if all bits
 * give no more cores than it had, the thread was not restricted.  If they give more, it was (by
 * taskset, a batch system, isolated cores), and the mask that was seen is restored at once.  The
 * answer is kept until the thread is seen with other cores, so that a sleep takes only two changes of
 * affinity.  A restriction to exactly the cpuset looks like no restriction.
 *
 * A change of the affinity by another process during the sleep is respected.  If the core of the
 * binding has left the cpuset instead, the binding is also undone.  Otherwise it would take effect
 * again when the core comes back.
 */
#ifndef SHMVEC_AFFINITY_H
#define SHMVEC_AFFINITY_H

#include <sched.h>

#include "platform.h"

typedef struct {
    cpu_set_t restored; /* the cores to request afterwards */
    cpu_set_t home;
    int count; /* number of cores that were allowed; 0: nothing was changed */
} sv_affinity;

/* Restricts this thread to the `index`-th of the cores that it may use, modulo their number. */
void sv_affinity_narrow(sv_affinity *saved, uint32_t index);

/* Takes the restriction back. */
void sv_affinity_widen(const sv_affinity *saved);

#endif
