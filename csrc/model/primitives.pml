/* primitives.pml — ring.h, bell.h and completion.h in Promela; see protocol.pml.
 *
 * A d_step is one access of one shared word, or of data that nobody else may touch at that moment;
 * what makes it one access is named beside it.  Tests on local variables are no steps of their own
 * for spin either, and a switch (see the table in protocol.pml) never changes what is one step,
 * unless that is the mistake.
 */

/* ---- ring.h ------------------------------------------------------------------------------- */

typedef sv_ring_shared {
    byte tail = NEAR_WRAP(POSITIONS);
    byte head = NEAR_WRAP(POSITIONS);
    byte first[CAPACITY];   /* the two halves of a record: which unit it is for, */
    byte sequence[CAPACITY] /* and its number, which is never 0 */
}

typedef sv_ring { /* the private handle of one end */
    byte position = NEAR_WRAP(POSITIONS);
    byte peer_position = NEAR_WRAP(POSITIONS)
}

#define used(tail_, head_) (((tail_) - (head_)) & (POSITIONS - 1))
#define place(handle) (handle.position & (CAPACITY - 1))
#define found(handle) (handle.position != handle.peer_position)

/* sv_ring_try_push().  `slab` is what goes with the record: actions, or results.  Three plain
 * writes come before the tail; the slab's and the first half's are one step, which leaves one
 * moment with half of it written.  Looking up the head is part of that step, too: it only ever
 * grows, so this is the moment at which the ring is most likely to seem full. */
inline sv_ring_try_push(ring, handle, unit, number, slab)
{
#ifdef TAIL_FIRST
    ring.tail = (handle.position + 1) % POSITIONS;
#endif
    d_step {
        if
        :: used(handle.position, handle.peer_position) >= CAPACITY ->
           handle.peer_position = ring.head; /* acquire */
           assert(used(handle.position, handle.peer_position) < CAPACITY)
        :: else
        fi;
        slab = number;
        ring.first[place(handle)] = unit
    }
    ring.sequence[place(handle)] = number;
    d_step {
        handle.position = (handle.position + 1) % POSITIONS;
        ring.tail = handle.position /* atomic_store_explicit, release */
    }
}

/* sv_ring_peek(): afterwards found(handle) says whether a record waits. */
inline sv_ring_peek(ring, handle)
{
    d_step {
        if
        :: handle.position == handle.peer_position ->
           handle.peer_position = ring.tail; /* atomic_load_explicit, acquire */
           assert(used(handle.peer_position, handle.position) <= CAPACITY)
        :: else
        fi
    }
}

/* The rest of sv_ring_try_pop(), after a peek that has found something.  The record is read in
 * one step: were it read in two, with a write between them, then the same writer could also come
 * between its own two writes and this step.  What was read is wiped, which the C code does not do:
 * fewer states, and whoever reads a place too early or twice finds number 0. */
inline take(ring, handle, unit, number)
{
    d_step {
        unit = ring.first[place(handle)];
        number = ring.sequence[place(handle)];
        ring.first[place(handle)] = 0;
        ring.sequence[place(handle)] = 0;
        handle.position = (handle.position + 1) % POSITIONS
    }
    ring.head = handle.position /* atomic_store_explicit, release */
}

/* ---- bell.h ------------------------------------------------------------------------------- */

/* `epoch` and `waiter` are one word: a d_step that touches both is one read-modify-write.
 * The kernel's queue of sleepers on it is `asleep`. */

/* sv_bell_listen(): the ticket is the word, which from now on has the waiter bit. */
inline sv_bell_listen()
{
    d_step { ticket = epoch; waiter = true } /* atomic_fetch_or_explicit */
}

/* sv_bell_sleep(): FUTEX_WAIT compares the word and queues the sleeper under one lock, so this is
 * one step.  There is no time-out unless slices are what is looked at. */
inline sv_bell_sleep()
{
#ifdef SLEEP_BLIND
    asleep[_pid] = true;
#else
    asleep[_pid] = (epoch == ticket && waiter); /* sv_futex_wait() */
#endif
    if
    :: !asleep[_pid]
#ifdef SLICES
    :: d_step { asleep[_pid] -> asleep[_pid] = false }
#endif
    fi
}

/* sv_futex_wake(): under the lock of the queue, so one step. */
inline sv_futex_wake(mask)
{
    d_step {
        i = 0;
        do
        :: i < WORKERS ->
           if
           :: ((mask) >> i) & 1 && asleep[i] -> asleep[i] = false;
#ifdef WAKE_ONE
              break
#endif
           :: else
           fi;
           i++
        :: else -> break
        od;
        i = 0
    }
}

/* sv_bell_ring(): afterwards saw_waiter says whether it took a system call.  The loop around the
 * compare-exchange is one step: its failed turns change nothing. */
inline sv_bell_ring(mask)
{
#if defined(SEPARATE_FLAG)
    do
    :: i < WORKERS ->
       d_step {
           if
           :: ((mask) >> i) & 1 && sleeping[i] -> sleeping[i] = false; asleep[i] = false
           :: else
           fi;
           i++
       }
    :: else -> i = 0; break
    od;
#elif defined(RING_SPLIT)
    d_step { before = epoch; saw_waiter = waiter };
    d_step { epoch = (before + 1) % EPOCHS; waiter = false; before = 0 };
#else
    d_step { /* for everyone a compare-exchange, for some atomic_fetch_add_explicit */
        saw_waiter = waiter;
#ifndef EPOCH_STUCK
        epoch = (epoch + 1) % EPOCHS;
#endif
#ifndef SOME_CLEARS
        if
        :: (mask) == SV_EVERYONE -> waiter = false
        :: else
        fi
#else
        waiter = false
#endif
    };
#endif
    if
    :: saw_waiter -> sv_futex_wake(mask)
    :: else
    fi
}

/* sv_bell_doze() */
inline sv_bell_doze()
{
#ifdef DOZE_SILENT
    sv_bell_listen();
#else
    dozers++; /* atomic_fetch_add_explicit */
    sv_bell_listen();
#endif
    ticket = 0 /* not needed: fewer states */
}

#define sv_bell_awake() dozers-- /* atomic_fetch_sub_explicit */
#define sv_bell_has_dozers() (dozers > 0) /* atomic_load_explicit */

/* ---- completion.h ------------------------------------------------------------------------- */

/* `done`, `target` and `armed` are one word; `target` and `armed` the half of it that the futex
 * compares.  `parent_asleep` is the kernel's queue.  The target has fewer bits than the count, as
 * in the C code. */

#ifdef COMPARE_PLAINLY
#define sv_completion_reached(count, goal) ((count) % TARGETS >= (goal) % TARGETS)
#else
#define sv_completion_reached(count, goal) ((((count) - (goal)) & (TARGETS - 1)) < TARGETS / 2)
#endif

#define sv_completion_check(goal) sv_completion_reached(done, goal) /* atomic_load_explicit */

/* sv_completion_add() */
inline sv_completion_add()
{
#if defined(ADD_SPLIT)
    must_wake = armed && sv_completion_reached(done + 1, target);
    done = (done + 1) % COUNTS;
#elif defined(ADD_STORES)
    count = done;
    d_step {
        done = (count + 1) % COUNTS;
        count = 0;
        must_wake = armed && sv_completion_reached(done, target)
    };
#else
    d_step {
        done = (done + 1) % COUNTS; /* atomic_fetch_add_explicit */
        must_wake = armed && sv_completion_reached(done, target)
    };
#endif
    if
    :: must_wake ->
#ifndef WAKE_UNCLEARED
       d_step { must_wake = armed; armed = false }; /* atomic_fetch_and_explicit */
#endif
       if
       :: must_wake ->
          d_step { parent_asleep = false; must_wake = false }; /* sv_futex_wake() */
#ifdef POLL
          signalled = true /* worker.pyx: complete, by write() */
#endif
       :: else
       fi
    :: else
    fi
}

/* sv_completion_arm(): the check and the compare-exchange are one step, because that exchange
 * fails if the word has changed since it was checked, and is then tried again. */
inline sv_completion_arm(goal)
{
    d_step {
#ifndef ARM_BLIND
        if
        :: sv_completion_reached(done, goal) -> refused = true
        :: else -> target = (goal) % TARGETS; armed = true
        fi
#else
        target = (goal) % TARGETS;
        armed = true
#endif
    }
}

/* sv_completion_sleep() */
inline sv_completion_sleep(goal)
{
    parent_asleep = (armed && target == (goal) % TARGETS); /* sv_futex_wait() */
    if
    :: !parent_asleep
#if (defined(SLICES) || defined(DEATH)) && !defined(NO_SLICES)
    :: d_step { parent_asleep -> parent_asleep = false }
#endif
    fi
}
