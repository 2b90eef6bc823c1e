/* protocol.pml — the protocol between parent and workers, for spin to check exhaustively.
 *
 * What is modelled.  One parent and a few workers, step by step as bell.h, completion.h, ring.h and
 * wait.c have it, and the code on top of them: caller.pyx and caller.pyx, worker.pyx, and the look
 * after the dead in supervisor.py.  Names are those of the code.  `name()` in a comment is a C
 * function and `file: name` a method elsewhere; a test looks whether they still exist.  The
 * primitives are in primitives.pml, the parent is in parent.pml, and the workers are here.
 *
 * A request is for a unit: all envs of a worker in a batch step, one env in a partial batch
 * (-DPARTIAL).  Unit u belongs to worker u mod WORKERS.  The parent asks each unit ROUNDS times,
 * and then every worker to close.  Workers may doze with -DDOZE.  Up to TRACES times the parent
 * tells all workers of a trace, before it asks or before it waits: a request that is answered by
 * nobody, and counted nowhere.
 *
 * What is left out, and why that hides nothing.
 *   - Spinning.  A spin is a few more looks before the one that parks, so it is the same as
 *     looking later, and when a look happens is up to spin.  Likewise clocks, budgets, naps, the
 *     measurements rung_at and done_at, and the hint who is last (issued).  What the parent does
 *     with `linger` is here (`waits_early`): it sleeps for all requests but one, then for the last.
 *   - Time-outs, but with -DSLICES and for the parent with -DDEATH.  A lost wake must not be hidden
 *     by a slice that ends: without these switches a sleep ends by a wake or never.
 *   - What the envs do, and the control channels, which channel.pml is about.  The slabs are here
 *     as one number a unit, written before the record is published and checked after it is taken;
 *     the byte rings publish in the same way as the record rings.
 *   - Rings that are full.  The capacity is no less than what can be outstanding; that is
 *     asserted.  So nobody waits for a head.
 *   - What a damaged segment holds, and the death of the parent: these are tests' business.
 *   - Numbers.  A request's is counted by unit, not over all, for fewer states; records name the
 *     unit, too.  Positions, the epoch, the count and the target wrap at small powers of two and
 *     begin just before that.  Each has room for what can happen while somebody holds an old
 *     value, as the real ones have (2**31 rings, or requests).
 *
 * Memory.  Promela is sequentially consistent, and the machines are not.  So this says nothing of
 * whether each acquire and release is where it must be: the headers argue that, and the stress
 * tests under ThreadSanitizer try it.  What a store buffer does (x86: a store becomes visible after
 * later loads) adds nothing here: between a plain store (slab, record, tail, head) and the next
 * read-modify-write or system call of the same process no load matters but that of the head of a
 * ring that seems full, and no ring is ever full.  The one mistake that needs a buffer,
 * SEPARATE_FLAG, has its reordering written out.  With -DFENCED as well it has not, and is right,
 * which shows that it is the reordering that spin finds.
 *
 * What is checked.
 *   - No lost wake, no deadlock: there is no state but the last in which nobody can go on ("invalid
 *     end state").
 *   - Each request is answered exactly once, by the worker that was asked, with the number that was
 *     asked; no half-written record or slab is read: assertions in take_answer, serve_pending and
 *     where the workers have ended.
 *   - With -DPOLL the parent does not sleep on the futex, but on a descriptor (caller.pyx: arm), for
 *     one more answer, and without slices: the descriptor, or a pidfd, wakes it, or nothing does.
 *     It then goes on without a worker that has died.
 *   - With -DDEATH a worker may die between any two of its steps.  In the code the parent then
 *     raises and all ends.  Here it goes on: it takes what the dead one had published, waits for
 *     the others' answers without slices, and closes them, because there the leftovers of the
 *     dead (waiter bit, dozer, armed word, counts) would show, and whoever restarts workers will
 *     build on it.
 *   - With -DDEATH and -DSLICES all runs end, given that whoever can go on does at some time
 *     (`ends`, weak fairness): no wait for ever on the dead, and nobody goes round in circles.
 *
 * How to run it, in an empty folder, for pan leaves many files:
 *     spin -a -DROUNDS=3 .../csrc/model/protocol.pml
 *     gcc -O2 -w -DCOLLAPSE -DSAFETY -o pan pan.c && ./pan
 * With -DDEATH or -DSLICES there is a claim: leave out -DSAFETY and run `./pan -a -f`.  After an
 * error `spin -k protocol.pml.trail -p -g`, with the same -D and file, shows how it came about.
 * tests/csrc/test_model.py has the sizes that are checked.
 *
 * A check that cannot fail is worth nothing, so each of these switches makes one mistake, and the
 * test fails unless spin finds it.
 *   LISTEN_LATE      a sleeper looks for work first and then listens
 *   SLEEP_BLIND      it sleeps whatever the bell's word is by then
 *   SEPARATE_FLAG    it says that it sleeps in a word of its own, on which it sleeps
 *   EPOCH_STUCK      a ring clears the waiter bit, but does not count
 *   RING_SPLIT       a ring loads and stores, instead of one read-modify-write
 *   RING_FIRST       the bell rings before the requests are in the rings
 *   SOME_CLEARS      a ring for some clears the waiter bit
 *   WAKE_ONE         a ring wakes one sleeper only
 *   DOZE_SILENT      a dozer is counted after it has looked for work
 *   ALARM_RESET      a dozer empties its descriptor after it has listened
 *   ROUSE_CUT_SHORT  an exception (Ctrl-C) comes between the ring and the writes to descriptors
 *   TAIL_FIRST       a record is published before it is written
 *   ASK_TWICE        a request is pushed twice
 *   COMPLETE_FIRST   a request is counted as done before its answer is in the ring
 *   ADD_SPLIT        a worker looks at `armed` before it adds, instead of both at once
 *   ADD_STORES       it loads and stores the count, instead of one read-modify-write
 *   WAKE_UNCLEARED   it wakes the parent without clearing `armed`
 *   ARM_BLIND        the parent arms whatever is done by then
 *   COMPARE_PLAINLY  counts are compared as if they did not wrap
 *   NO_SLICES        the parent sleeps until it is woken, though workers die
 *   NO_LOOK          the parent does not look after the dead
 *   TRACE_BLIND      the parent tells of a trace whether or not that leaves room for what else it asks
 *   TRACE_COUNTED    it waits until that is done, too
 *   TRACE_ANSWERED   a worker answers that
 *   DROP_THE_DEAD    it does not take the answers that the dead had given
 *   POLL_LATE        a parent that polls reads the count after the rings
 *   POLL_CLEARS      it clears its descriptor after it has armed
 *   POLL_BY_ISSUED   it arms for the count of requests, as if no worker had died before it counted
 *   POLL_NO_PIDFD    it does not watch the workers' pidfds
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef UNITS
#define UNITS WORKERS
#endif
#ifndef TRACES
#define TRACES 0
#endif

/* Each wraps at a power of two; COUNTS and TARGETS are 2**32 and 2**31 in the code. */
#if TRACES
#define CAPACITY 4 /* as in assembly.py, for one unit a worker: 2 * 1 + 2 */
#define POSITIONS 8
#else
#define CAPACITY 2
#define POSITIONS 4
#endif
#define EPOCHS 8
#define COUNTS 16
#define TARGETS 8
#define NEAR_WRAP(modulus) (modulus - 2)

#define CLOSE UNITS /* in place of a unit: the operation */
#define TELL (UNITS + 1)
#define SV_EVERYONE ((1 << WORKERS) - 1)
#define worker_of(unit) ((unit) % WORKERS)

#include "primitives.pml"

/* The segment.  Each slab has places for CLOSE and TELL, so that these are requests like the others. */
sv_ring_shared requests[WORKERS];
sv_ring_shared completions[WORKERS];
byte actions[UNITS + 2];
byte results[UNITS + 2];
byte epoch = NEAR_WRAP(EPOCHS); /* the bell: one word with `waiter` */
bool waiter;
byte dozers;
byte done = NEAR_WRAP(COUNTS); /* the completion: one word with `target` and `armed` */
byte target;
bool armed;
#ifdef SEPARATE_FLAG
bool sleeping[WORKERS];
#endif

/* The kernel: who sleeps on a futex, whose descriptor was written to, who has ended. */
bool asleep[WORKERS];
bool parent_asleep;
#ifdef POLL
bool signalled;
#endif
bool alarms[WORKERS];
bool ended[WORKERS];
bool dead[WORKERS];
byte doomed = WORKERS; /* the worker that is to die; WORKERS: none */
bool finished;         /* the parent has */

/* ---- a worker ----------------------------------------------------------------------------- */

#define my_requests requests[_pid]
#define my_completions completions[_pid]

/* sleep_for_request(), and the start of the next sv_wait_request(). */
inline sleep_for_request()
{
#if defined(LISTEN_LATE)
    sv_ring_peek(my_requests, asked);
    if
    :: found(asked)
    :: else -> sv_bell_listen(); sv_bell_sleep()
    fi;
#elif defined(SEPARATE_FLAG)
    if /* the store of the flag waits in the store buffer while the tail is loaded, or not */
    :: sleeping[_pid] = true; sv_ring_peek(my_requests, asked)
#ifndef FENCED
    :: sv_ring_peek(my_requests, asked); sleeping[_pid] = true
#endif
    fi;
    if
    :: found(asked) -> sleeping[_pid] = false
    :: else -> asleep[_pid] = sleeping[_pid]; !asleep[_pid] /* a futex on the flag */
    fi;
#else
    sv_bell_listen();
    sv_ring_peek(my_requests, asked);
    if
    :: found(asked)
    :: else -> sv_bell_sleep()
    fi;
#endif
    ticket = 0
}

/* worker.pyx: serve, and overlap.py: doze.  poll() and read() are two steps: what the parent
 * writes between them is read with the rest. */
inline doze()
{
    sv_bell_doze();
    sv_ring_peek(my_requests, asked);
#ifdef DOZE_SILENT
    dozers++;
#endif
#ifdef ALARM_RESET
    alarms[_pid] = false;
#endif
    if
    :: found(asked)
    :: else -> alarms[_pid]; alarms[_pid] = false
    fi;
    sv_bell_awake()
}

/* worker.pyx: complete */
inline complete()
{
#ifdef COMPLETE_FIRST
    sv_completion_add();
#endif
    sv_ring_try_push(my_completions, answers, unit, number, results[unit]);
#ifndef COMPLETE_FIRST
    sv_completion_add()
#endif
}

/* worker.pyx: serve_pending */
inline serve_pending()
{
    do
    :: sv_ring_peek(my_requests, asked);
       if
       :: found(asked) -> take(my_requests, asked, unit, number)
       :: else -> break
       fi;
       assert(actions[unit] == number);
       if
       :: unit == CLOSE -> goto close_envs
#if TRACES && !defined(TRACE_ANSWERED)
       :: unit == TELL
#endif
       :: else -> complete() /* worker.pyx: execute */
       fi;
       unit = 0; number = 0
    od
}

/* worker.pyx: serve.  That it dozes only after a while is a matter of time: here it may at once. */
active [WORKERS] proctype worker() /* _pid: 0 to WORKERS - 1 */
{
    sv_ring asked, answers;
    byte ticket, unit, number;
    bool must_wake;
#ifdef ADD_STORES
    byte count;
#endif
    {
        do
        :: sv_ring_peek(my_requests, asked);
           if
           :: found(asked) -> serve_pending()
           :: else ->
              if
              :: sleep_for_request()
#ifdef DOZE
              :: doze()
#endif
              fi
           fi
        od;
close_envs:
        ended[_pid] = true
    }
#ifdef DEATH
    unless { /* spin tries this before each step of the above */
        d_step { doomed == _pid -> asleep[_pid] = false; dead[_pid] = true }
    }
#endif
}

#ifdef DEATH
/* One worker, the first to be asked or the last, dies at some time, or none. */
active proctype death()
{
    if
    :: true
    :: doomed = 0
    :: doomed = WORKERS - 1
    fi
}
#endif

#include "parent.pml"

#if defined(DEATH) || defined(SLICES)
ltl ends { <> finished }
#endif
