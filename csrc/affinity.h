/* affinity.h — where a sleeper wants to be woken: a binding to one core that lasts as long as the
 * sleep (wait.h says when that pays).
 *
 * The scheduler is told by the thread's own affinity, so what was allowed before must come back
 * afterwards, and that is more than the cores that were seen.  The kernel keeps two masks: the
 * cpuset, which administrators change while we run (a container gets more cores), and the one that
 * was asked for, if any; a thread may use what both have in common.  (If they have nothing in
 * common it may use the whole cpuset, until they have.  Before Linux 6.2 a change of the cpuset
 * forgets the other.)  Who asks for just the cores that he saw will never see those that come.
 *
 * So a thread that may use everything asks for everything: all bits set, of which the kernel takes
 * what there is now and adds what comes.  Whether it may is found by trying: if all bits give no
 * more than it had, nobody has restricted it.  If they give more, somebody has (taskset, a batch
 * system, isolated cores), and what was seen is asked for again at once.  The answer is kept until
 * the thread is seen with other cores, so that a sleep takes two changes of affinity, no more.  A
 * restriction to exactly the cpuset cannot be told from none.
 *
 * Whoever else changes the affinity during the sleep is respected.  If instead the core that it was
 * bound to has left the cpuset, it would be bound again the day it comes back: so that is undone, too.
 */
#ifndef SHMVEC_AFFINITY_H
#define SHMVEC_AFFINITY_H

#include <sched.h>

#include "platform.h"

typedef struct {
    cpu_set_t wide; /* what to ask for afterwards */
    cpu_set_t home;
    int count; /* of the cores that were allowed; 0: nothing was changed */
} sv_affinity;

/* Restricts this thread to the `index`-th of the cores that it may use, modulo their number. */
void sv_affinity_narrow(sv_affinity *saved, uint32_t index);

/* Takes the restriction back. */
void sv_affinity_widen(const sv_affinity *saved);

#endif
