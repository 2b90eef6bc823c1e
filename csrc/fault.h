/* fault.h — kills this process at a numbered point of the protocol, for tests of how the other side
 * recovers.
 *
 * The process that should die arms a point (sv_fault_point).  Other points cost a load and a
 * comparison.  The points, in a worker:
 *
 *     1  a request was taken, nothing done            7  the answer is published, not counted
 *     2  some envs of the request were stepped        8  it is counted, the parent not woken
 *     3  an observation is written, its reward not    9  the late message is not sent
 *     4  a message is written, not published         10  listening to the bell, not asleep
 *     5  all results are written, no answer          11  awake again, the ring not looked at
 *     6  the answer is written, not published
 */
#ifndef SHMVEC_FAULT_H
#define SHMVEC_FAULT_H

#include <signal.h>
#include <unistd.h>

#define SV_FAULT_POINTS 11

/* Weak, so that every file with a point may define it, and all share it. */
__attribute__((weak, visibility("hidden"))) int sv_fault_point;

#define SV_FAULT(point)                                                                            \
    do {                                                                                           \
        if (__builtin_expect(sv_fault_point == (point), 0))                                        \
            kill(getpid(), SIGKILL);                                                               \
    } while (0)

#endif
