/* bell.c — see bell.h for the protocol and why no wake is lost. */
#include "bell.h"

#define WAITER UINT32_C(1)
#define EPOCH UINT32_C(2)

uint32_t sv_bell_listen(sv_bell *bell)
{
    /* acq_rel: acquire pairs with the release of sv_bell_ring, making the work that was published
     * before it visible to the caller's check; release keeps the bit's order among listeners. */
    return atomic_fetch_or_explicit(&bell->word, WAITER, memory_order_acq_rel) | WAITER;
}

int sv_bell_sleep(sv_bell *bell, uint32_t ticket, uint32_t mask, int64_t timeout_ns)
{
    return sv_futex_wait(&bell->word, ticket, timeout_ns, mask);
}

bool sv_bell_ring(sv_bell *bell, uint32_t mask)
{
    uint32_t before;
    /* relaxed: only a measurement. */
    atomic_store_explicit(&bell->rung_at, sv_now_ns(), memory_order_relaxed);
    if (mask == SV_EVERYONE) {
        /* relaxed: only a first guess for the compare-exchange below. */
        before = atomic_load_explicit(&bell->word, memory_order_relaxed);
        /* acq_rel: release pairs with the acquire of sv_bell_listen; see bell.h. */
        while (!atomic_compare_exchange_weak_explicit(&bell->word, &before,
                                                      (before + EPOCH) & ~WAITER,
                                                      memory_order_acq_rel, memory_order_relaxed))
            ;
    } else {
        /* acq_rel: as above.  The waiter bit stays: others may still sleep. */
        before = atomic_fetch_add_explicit(&bell->word, EPOCH, memory_order_acq_rel);
    }
    if (!(before & WAITER))
        return false;
    sv_futex_wake(&bell->word, mask);
    return true;
}
