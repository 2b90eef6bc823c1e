/* guard.h — admits one call at a time: a second call is refused at once, and does not wait.
 *
 * One word holds the id of the thread whose call is under way; 0: none is.  A call that finds an id
 * there is refused, even if it is that of its own thread: a re-entrant call, made by a signal handler
 * in the middle of another call, would see that call half done.  Each call sees all that earlier calls
 * did.
 *
 * A guard is private to its process.
 */
#ifndef SHMVEC_GUARD_H
#define SHMVEC_GUARD_H

#include "platform.h"

typedef struct {
    _Atomic uint64_t owner; /* the thread that is inside; 0: none */
} sv_guard;

/* Begins a call.  Returns false if a call is under way. */
static inline bool sv_guard_enter(sv_guard *guard, uint64_t me)
{
    uint64_t none = 0;
    /* acquire: pairs with the release of sv_guard_leave, so that this call sees what the last one
     * did.  relaxed: a call that is refused reads nothing. */
    return atomic_compare_exchange_strong_explicit(&guard->owner, &none, me, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* Whether the call that is under way is this thread's. */
static inline bool sv_guard_is_mine(const sv_guard *guard, uint64_t me)
{
    /* relaxed: a thread finds its own id only if it has stored it itself. */
    return atomic_load_explicit(&guard->owner, memory_order_relaxed) == me;
}

/* Ends a call.  Precondition: the caller has entered. */
static inline void sv_guard_leave(sv_guard *guard)
{
    /* release: pairs with the acquire of sv_guard_enter. */
    atomic_store_explicit(&guard->owner, 0, memory_order_release);
}

#endif
