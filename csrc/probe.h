/* probe.h — measures what a hand-over between two cores costs, and how fast all cores are together.
 *
 * wait.h rests on the costs of waking a sleeper, of a switch, and of reading the clock.  Where one of
 * them is far from the usual, the cause is the machine (a hypervisor, a power-saving governor, a clock
 * that is a system call, two "cores" that are one): python -m shmvec doctor reports it.
 *
 * Players are processes, as workers are, and each is bound to a core, so that the scheduler decides
 * nothing.  They are forked here and run only code of this file, so the caller's threads do not
 * matter.  Each stops at a given time, or when the caller's thread ends, so no wait lasts for ever.
 */
#ifndef SHMVEC_PROBE_H
#define SHMVEC_PROBE_H

#include "platform.h"

/* Has two players, each on a core, wake each other for duration_ns; both may be on one core.
 *
 * Returns ns there and back, or 0: they could not be started, or have not met. */
double sv_probe_round_trip(uint32_t core, uint32_t other, int64_t duration_ns);

/* Has a player on each of these cores compute for duration_ns.
 *
 * `rates[i]`: the work of the i-th in a ns; 0: it could not be started.  Returns false if there is no
 * memory for it. */
bool sv_probe_rates(const uint32_t *cores, uint32_t count, int64_t duration_ns, double *rates);

/* ns of a reading of the clock, by the caller. */
double sv_probe_clock(int64_t duration_ns);

#endif
