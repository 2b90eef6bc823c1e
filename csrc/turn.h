/* turn.h — a thread's turn inside something: another one is refused at once, and does not wait.
 *
 * Of all that call sv_turn_take at the same time one is inside; it may take its turn again, and gives
 * it back as often.  What it did inside is seen by whoever comes after it.
 *
 * One word says who is inside.  A thread finds its own name there only if it has put it there itself,
 * and only it takes that away again; so the load that looks for it needs no order, and taking the turn
 * once more costs no atomic operation.
 *
 * Private to a process, and to be used by threads that know each other's names: 0 is nobody's.
 */
#ifndef SHMVEC_TURN_H
#define SHMVEC_TURN_H

#include "platform.h"

typedef struct {
    _Atomic uint64_t owner; /* the thread that is inside; 0: none */
    uint32_t depth;         /* how often it has taken its turn: its own affair */
} sv_turn;

/* Returns false: another thread is inside. */
static inline bool sv_turn_take(sv_turn *turn, uint64_t me)
{
    /* relaxed: if it is me, it was me who wrote it. */
    if (atomic_load_explicit(&turn->owner, memory_order_relaxed) != me) {
        uint64_t nobody = 0;
        /* acquire: pairs with the release of sv_turn_give: what was done inside is seen.  relaxed:
         * who is refused looks at nothing. */
        if (!atomic_compare_exchange_strong_explicit(&turn->owner, &nobody, me,
                                                     memory_order_acquire, memory_order_relaxed))
            return false;
    }
    turn->depth++;
    return true;
}

/* How often I have taken it and not given it back. */
static inline uint32_t sv_turn_depth(const sv_turn *turn, uint64_t me)
{
    /* relaxed: as above. */
    return atomic_load_explicit(&turn->owner, memory_order_relaxed) == me ? turn->depth : 0;
}

/* Precondition: the caller has taken it once more than given it back. */
static inline void sv_turn_give(sv_turn *turn)
{
    if (--turn->depth == 0)
        /* release: pairs with the acquire of sv_turn_take. */
        atomic_store_explicit(&turn->owner, 0, memory_order_release);
}

#endif
