/* bell.h — an event count: many sleepers, one wake, no lost wake.
 *
 * A bell wakes workers so that they look at their rings.  It carries no data; it only ends a sleep.
 * One 32-bit word holds the epoch (bits 31..1) and the waiter bit
 * (bit 0: a worker sleeps, or is about to).
 *
 * Use, by a sleeper:                        Use, by the ringer:
 *     ticket = sv_bell_listen(bell);            publish the work (ring tail, release)
 *     if (nothing to do)                        sv_bell_ring(bell, SV_EVERYONE);
 *         sv_bell_sleep(bell, ticket, ...);
 *
 * Why no wake is lost: listen and ring are both read-modify-writes of the same word, so one of
 * them comes first in its modification order.  If the ring came first, listen reads its value
 * (acquire pairs with the ring's release) and the work published before it is visible to the
 * check that follows.  If listen came first, the ring sees the waiter bit and wakes; and should it
 * do so before the sleeper is asleep, the epoch has moved and the futex refuses to sleep.
 * (A separate "sleeping" flag with release stores and acquire loads loses wakes: nothing then
 * orders the flag's store before the load of the work.)
 *
 * No system call is made unless the waiter bit is set.  A ring for everyone clears it.  A ring for
 * some leaves it set, because the others may still sleep.  Until the next ring for everyone, each
 * ring then makes a system call, needed or not (0.3 µs), which is cheaper than counting sleepers.
 *
 * Sleeping costs a little, since it is taken in slices.  A worker without work for long dozes
 * instead: it adds itself to the count of dozers and sleeps on a file descriptor of its own, without
 * slices.  When a ring finds the waiter bit and dozers, the ringer writes to descriptors: to all of
 * them after a ring for everyone, to those of the workers that it has work for after a ring for some.
 * The same proof holds: the count of dozers goes up before the read-modify-write that sets the waiter
 * bit.  A ringer that clears the bit has written to every descriptor, so a dozer whose bit was cleared
 * wakes, finds nothing to do and announces itself again.  So a ring for it alone finds the bit set, or
 * the dozer awake.
 *
 * A sleeper that dies leaves at most the waiter bit behind, which the next full ring clears, and
 * its place among the dozers, which costs the ringer a few writes for nothing.
 */
#ifndef SHMVEC_BELL_H
#define SHMVEC_BELL_H

#include "platform.h"

typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint32_t word;
    _Atomic uint32_t dozers;
    _Atomic int64_t rung_at; /* when it last rang, from which waiters learn how late they woke */
} sv_bell;

/* Announces a sleeper.  Returns the ticket for sv_bell_sleep.  The caller must check for work
 * between the two calls. */
uint32_t sv_bell_listen(sv_bell *bell);

/* Sleeps until the bell rings after `ticket` was taken, at most timeout_ns.  `mask` has the
 * sleeper's bit (see sv_bell_mask).  Returns 0 (maybe spurious), ETIMEDOUT or EINTR. */
int sv_bell_sleep(sv_bell *bell, uint32_t ticket, uint32_t mask, int64_t timeout_ns);

/* Wakes the sleepers whose mask shares a bit with `mask`; SV_EVERYONE wakes all with one call.
 * Returns whether that took a system call: then see sv_bell_has_dozers. */
bool sv_bell_ring(sv_bell *bell, uint32_t mask);

/* Announces a dozer.  The caller must check for work before it sleeps on its descriptor, and call
 * sv_bell_awake when it is awake. */
static inline void sv_bell_doze(sv_bell *bell)
{
    /* relaxed: ordered by the release of sv_bell_listen, which pairs with sv_bell_ring. */
    atomic_fetch_add_explicit(&bell->dozers, 1, memory_order_relaxed);
    sv_bell_listen(bell);
}

static inline void sv_bell_awake(sv_bell *bell)
{
    /* relaxed: a count that is too high costs a few writes, no more. */
    atomic_fetch_sub_explicit(&bell->dozers, 1, memory_order_relaxed);
}

/* Ringer, after a ring that returned true: whether it must write to descriptors (to all of them after
 * a ring for everyone). */
static inline bool sv_bell_has_dozers(sv_bell *bell)
{
    /* relaxed: ordered by the acquire of sv_bell_ring, which pairs with sv_bell_doze. */
    return atomic_load_explicit(&bell->dozers, memory_order_relaxed) > 0;
}

/* The bit of sleeper `index`.  Above 32 sleepers bits are shared: a few wake for nothing. */
static inline uint32_t sv_bell_mask(uint32_t index)
{
    return UINT32_C(1) << (index % 32);
}

#endif
