/* affinity.h — binds a sleeper to one core, on which it is then woken, for as long as the sleep lasts
 * (wait.h says when that pays).
 *
 * The scheduler follows the thread's own affinity, so the affinity before the sleep must be restored
 * afterwards, and that is more than the cores that were seen.  The kernel keeps two masks: the
 * cpuset, which administrators change while we run (a container gets more cores), and the mask that
 * was requested, if any; a thread may use what both have in common.  (If they have nothing in common
 * it may use the whole cpuset, until they have.  Before Linux 6.2 a change of the cpuset forgets the
 * requested mask.)  A thread that requests just the cores that it saw never gets those added later.
 *
 * So a thread that may use every core requests all of them: all bits set, of which the kernel takes
 * the cores that there are now and adds those that come.  Trying shows whether it may: if all bits
 * give no more cores than it had, the thread was not restricted.  If they give more, it was (by
 * taskset, a batch system, isolated cores), and the mask that was seen is restored at once.  The
 * answer is kept until the thread is seen with other cores, so that a sleep takes two changes of
 * affinity, no more.  A restriction to exactly the cpuset looks like no restriction.
 *
 * A change of the affinity by another process during the sleep is respected.  If the core of the
 * binding has left the cpuset instead, the binding is undone as well: otherwise it would take effect
 * again the day that the core comes back.
 */
#ifndef SHMVEC_AFFINITY_H
#define SHMVEC_AFFINITY_H

#include <sched.h>

#include "platform.h"

typedef struct {
    cpu_set_t wide; /* the cores to request afterwards */
    cpu_set_t home;
    int count; /* number of cores that were allowed; 0: nothing was changed */
} sv_affinity;

/* Restricts this thread to the `index`-th of the cores that it may use, modulo their number. */
void sv_affinity_narrow(sv_affinity *saved, uint32_t index);

/* Takes the restriction back. */
void sv_affinity_widen(const sv_affinity *saved);

#endif
