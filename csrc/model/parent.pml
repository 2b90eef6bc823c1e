/* parent.pml — the parent's side; see protocol.pml. */

#define may_ask(unit) (!out[unit] && rounds[unit] < ROUNDS)

/* How many units may be asked now. */
inline count_choices()
{
    d_step {
        do
        :: u < UNITS ->
           if
           :: may_ask(u) -> choices++
           :: else
           fi;
           u++
        :: else -> u = 0; break
        od
    }
}

/* caller.pyx: post, which asks any of those that may be asked, but one at
 * least if none is out. */
inline post()
{
    do
    :: u < UNITS ->
       if
       :: may_ask(u) ->
          if
          :: true ->
             sv_ring_try_push(requests[worker_of(u)], asked[worker_of(u)], u, rounds[u] + 1,
                              actions[u]);
#ifdef ASK_TWICE
             sv_ring_try_push(requests[worker_of(u)], asked[worker_of(u)], u, rounds[u] + 1,
                              actions[u]);
#endif
             d_step {
                 out[u] = true;
                 rounds[u]++;
                 open++;
                 issued = (issued + 1) % COUNTS;
                 mask = mask | (1 << worker_of(u))
             }
#ifdef PARTIAL
          :: open > 0 || choices > 1
#endif
          fi;
          choices--
       :: else
       fi;
       u++
    :: else -> u = 0; break
    od
}

/* caller.pyx: rouse */
inline rouse(mask)
{
    do
    :: i < WORKERS -> d_step { alarms[i] = alarms[i] || ((mask) >> i) & 1; i++ }
    :: else -> i = 0; break
    od
}

/* caller.pyx: ring */
inline ring_bell(mask)
{
    sv_bell_ring(mask);
#ifdef DOZE
    if
    :: saw_waiter && sv_bell_has_dozers() ->
       if
       :: rouse(mask)
#ifdef ROUSE_CUT_SHORT
       :: true
#endif
       fi
    :: else
    fi;
#endif
    saw_waiter = false
}

#if TRACES
/* ring.h has sv_ring_room().  It must do for a request to each unit of a worker, that may be in the
 * ring by now, and for CLOSE. */
#define room(w) (CAPACITY - used(asked[w].position, requests[w].head))
#ifdef TRACE_BLIND
#define may_tell true
#else
#define may_tell (room(0) >= 3 && room(WORKERS - 1) >= 3)
#endif

/* caller.pyx: record */
inline record()
{
    do
    :: traces < TRACES && may_tell ->
       traces++;
       do
       :: w < WORKERS ->
          sv_ring_try_push(requests[w], asked[w], TELL, 1, actions[TELL]);
#ifdef TRACE_COUNTED
          issued = (issued + 1) % COUNTS;
#endif
          w++
       :: else -> w = 0; break
       od;
       ring_bell(SV_EVERYONE)
    :: true -> break
    od
}
#endif

/* supervisor.py: dead_workers.  In the code it is an event. */
inline look()
{
#if defined(DEATH) && !defined(NO_LOOK)
    if
    :: dead[0] || dead[WORKERS - 1] -> goto crashed
    :: else
    fi
#else
    skip
#endif
}

/* caller.pyx: wait_for, with sv_wait_completion() and sleep_for_completion().  A sleep after which
 * the target is not reached is the end of a slice, or a wake meant for an earlier target: the code
 * cannot tell them apart and looks after the dead in either case. */
inline wait_for(goal)
{
    do
    :: if
       :: sv_completion_check(goal) -> break
       :: else
       fi;
       until = (goal + COUNTS - waits_early) % COUNTS;
       sv_completion_arm(until);
       if
       :: refused -> refused = false
       :: else -> sv_completion_sleep(until)
       fi;
       if
       :: sv_completion_check(until) -> waits_early = false
       :: else -> look()
       fi;
       until = 0
    od;
    waits_early = false
}

/* What both do with an answer: it is whole, of a worker that was asked, and the only one. */
inline take_answer()
{
    take(completions[w], answers[w], unit, number);
    assert(unit < UNITS && out[unit] && worker_of(unit) == w);
    assert(number == rounds[unit] && results[unit] == number);
    d_step { out[unit] = false; results[unit] = 0; open--; unit = 0; number = 0 }
}

/* caller.pyx: pop, which may find none of some workers. */
inline collect()
{
    do
    :: w < WORKERS ->
       sv_ring_peek(completions[w], answers[w]);
       if
       :: found(answers[w]) -> take_answer()
       :: else -> w++
       fi
    :: else -> w = 0; break
    od
}

#ifdef DROP_THE_DEAD
#define is_read(worker) (!dead[worker])
#else
#define is_read(worker) true
#endif

/* As collect, after a death: of the dead one what is there, of each other all that it was asked. */
inline collect_after_death()
{
    do
    :: w < WORKERS ->
       sv_ring_peek(completions[w], answers[w]);
       if
       :: found(answers[w]) && is_read(w) -> take_answer()
       :: else ->
          d_step {
              do
              :: u < UNITS ->
                 if
                 :: out[u] && worker_of(u) == w -> mask = 1
                 :: else
                 fi;
                 u++
              :: else -> u = 0; break
              od
          }
          if
          :: mask && !dead[w] -> mask = 0; completions[w].tail != answers[w].position
          :: else -> mask = 0; w++
          fi
       fi
    :: else -> w = 0; break
    od
}

#ifdef POLL
/* caller.pyx: lose, of what epoll tells by a pidfd; there is no successor. */
inline bury()
{
    do
    :: w < WORKERS ->
       if
       :: dead[w] && !buried[w] ->
          sv_ring_peek(completions[w], answers[w]);
          if
          :: found(answers[w]) -> take_answer()
          :: else ->
             d_step {
                 do
                 :: u < UNITS ->
                    if
                    :: worker_of(u) == w ->
                       rounds[u] = ROUNDS; open = open - out[u]; out[u] = false
                    :: else
                    fi;
                    u++
                 :: else -> u = 0; break
                 od;
                 buried[w] = true
             }
          fi
       :: else -> w++
       fi
    :: else -> w = 0; break
    od
}

#ifdef POLL_NO_PIDFD
#define someone_died false
#else
#define someone_died (dead[0] && !buried[0] || dead[WORKERS - 1] && !buried[WORKERS - 1])
#endif

/* caller.pyx: answered */
inline look_at_rings()
{
    do
    :: w < WORKERS ->
       sv_ring_peek(completions[w], answers[w]);
       waits_early = waits_early || found(answers[w]); /* here: an answer is there already */
       w++
    :: else -> w = 0; break
    od
}

/* exchange.py: poll, once: it takes what is there, or arms and sleeps. */
inline poll_once()
{
#if defined(POLL_BY_ISSUED)
    goal = (issued + COUNTS - open + 1) % COUNTS;
    look_at_rings();
#elif defined(POLL_LATE)
    look_at_rings();
    goal = (done + 1) % COUNTS;
#else
    goal = (done + 1) % COUNTS; /* sv_completion_done() */
    look_at_rings();
#endif
    if
    :: waits_early -> waits_early = false
    :: else ->
       sv_completion_arm(goal);
       if
       :: refused -> refused = false
       :: else ->
#ifdef POLL_CLEARS
          signalled = false;
#endif
          signalled || someone_died; /* epoll_wait(), which takes the edge */
          signalled = false
       fi
    fi;
    goal = 0;
#ifdef DEATH
    bury();
#endif
    collect()
}
#endif

active proctype parent()
{
    sv_ring asked[WORKERS], answers[WORKERS];
    byte rounds[UNITS]; /* how often each unit was asked; the number of its last request */
    bool out[UNITS];    /* asked, and has not answered */
    byte open;          /* how many of them there are */
    byte issued = NEAR_WRAP(COUNTS);
    byte goal, until;   /* counts: to be waited for, and slept for just now */
    byte choices, mask, i, u, w, unit, number;
#if TRACES
    byte traces;
#endif
    bool saw_waiter, refused, waits_early;
#ifdef RING_SPLIT
    byte before;
#endif
#ifdef POLL
    bool buried[WORKERS];
#endif

    do
    ::
#if TRACES
       record();
#endif
       count_choices();
       if
       :: choices == 0 && open == 0 -> break
       :: else
       fi;
#ifdef RING_FIRST
       ring_bell(SV_EVERYONE);
       post();
#else
       post();
       if
       :: mask != 0 -> ring_bell(SV_EVERYONE)
#ifdef PARTIAL
       :: mask != 0 -> ring_bell(mask) /* caller.pyx: mask_of */
       :: mask == 0
#endif
       fi;
#endif
       mask = 0;
#if TRACES
       record(); /* between step_async and step_wait, say */
#endif
#ifdef POLL
       poll_once();
#else
#ifdef PARTIAL
       if /* caller.pyx: wait, for one more or for all */
       :: goal = issued
       :: open > 1 -> goal = (issued + COUNTS - open + 1) % COUNTS
       fi;
#else
       goal = issued;
       if
       :: waits_early = true
       :: true
       fi;
#endif
       wait_for(goal);
       goal = 0;
       collect();
#ifndef PARTIAL
       assert(open == 0)
#endif
#endif
    od;
#if defined(DEATH) && !defined(POLL)
    goto close_all;
crashed:
    waits_early = false;
    until = 0;
    goal = 0;
    collect_after_death();
close_all:
#endif
    do /* caller.pyx: ask_to_close */
    :: w < WORKERS && !dead[w] ->
       sv_ring_try_push(requests[w], asked[w], CLOSE, 1, actions[CLOSE]);
       w++
#ifdef DEATH
    :: w < WORKERS && dead[w] -> w++
#endif
    :: w == WORKERS -> w = 0; break
    od;
    ring_bell(SV_EVERYONE);
    do /* supervisor.py: stop */
    :: w < WORKERS ->
       ended[w] || dead[w];
       sv_ring_peek(completions[w], answers[w]);
       assert(!found(answers[w]) && answers[w].position == completions[w].tail);
       w++
    :: else -> break
    od;
    finished = true
}
