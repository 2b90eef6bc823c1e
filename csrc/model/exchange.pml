/* exchange.pml — the parent's side of the control channels; see channel.pml. */

/* ---- its channels -------------------------------------------------------------------------- */

chan outbox[WORKERS] = [8] of { byte, byte, mtype };
chan inbox[WORKERS] = [4] of { byte, byte };
bool half[WORKERS]; /* the first part of a message has been read, namely of this one: */
byte half_content[WORKERS], half_number[WORKERS];

#if WORKERS > 1
#define each(action) :: action(0) :: action(1)
#else
#define each(action) :: action(0)
#endif

/* messages.pyx: put */
inline put(w, content_, number_)
{
    d_step {
        assert(len(outbox[w]) <= 6);
        outbox[w]!content_, number_, FIRST;
        outbox[w]!content_, number_, LAST
    }
}

/* messages.pyx: flush */
inline flush(w)
{
    d_step {
        nempty(outbox[w]) && nfull(down[w]) ->
        outbox[w]?content, number, part;
        down[w]!content, number, part;
        content = 0; number = 0; part = 0
    }
}

/* messages.pyx: fill */
inline fill(w)
{
    d_step {
        nempty(up[w]) ->
        up[w]?content, number, part;
        if
        :: part == FIRST ->
           assert(!half[w]);
           half[w] = true; half_content[w] = content; half_number[w] = number
        :: part == LAST ->
           assert(half[w] && half_content[w] == content && half_number[w] == number);
           assert(nfull(inbox[w]));
           inbox[w]!content, number;
           half[w] = false; half_content[w] = 0; half_number[w] = 0
#if DEATHS
        :: part == REPORT ->
           assert(!half[w] && building[w]);
#ifdef LOSE_ONCE
           is_lost[w] = false;
#endif
           building[w] = false
#endif
        fi;
        content = 0; number = 0; part = 0
    }
}

/* ---- asking -------------------------------------------------------------------------------- */

/* The ledger. */
mtype state[MOST_UNITS] = IDLE;
byte numbers[MOST_UNITS];  /* of each unit's last request */
byte asked[MOST_UNITS];    /* what that was */
byte answered[MOST_UNITS]; /* READY: what these are the results of */
chan owed[WORKERS] = [CAPACITY] of { byte, byte, bool }; /* the first one's message is to come */
#if DEATHS
bool building[WORKERS]; /* a successor was started, and has not said yet that it is built */
#ifdef LOSE_ONCE
bool is_lost[WORKERS];
#endif
#ifdef LOOK_ONCE
bool is_down[WORKERS];
#endif
#endif

#define is_out(u) (state[u] == OUT || state[u] == OWED)
#define is_out_beside(u, v) ((u) != (v) && worker_of(u) == worker_of(v) && is_out(v))
#ifdef LEND_ALWAYS
#define may_lend(u) true
#else
#define may_lend(u) (!is_out_beside(u, 0) && !is_out_beside(u, 1) && !is_out_beside(u, 2))
#endif

#define any(what) (state[0] == what || state[1] == what || state[2] == what)

/* caller.pyx: request, and caller.pyx: mark_asked */
inline push(u, number_, message_)
{
    d_step {
        assert(nfull(requests[worker_of(u)]));
        requests[worker_of(u)]!content_for(u), number_, message_;
        state[u] = OUT;
        lent[u] = message_ && may_lend(u); /* exchange.py: _ask_command */
        numbers[u] = number_;
        asked[u] = content_for(u)
    }
}

#ifdef COUNT_LAST
#define in_hand following(sequence)
#else
#define in_hand sequence
#endif

/* caller.pyx: post, of one unit. */
inline post(u)
{
#ifndef COUNT_LAST
    sequence = following(sequence);
#endif
    if
    :: push(u, in_hand, false)
#if defined(BLOCKING_SEND)
    :: push(u, in_hand, true);
       down[worker_of(u)]!content_for(u), in_hand, FIRST;
       down[worker_of(u)]!content_for(u), in_hand, LAST
#elif defined(PUSH_FIRST)
    :: push(u, in_hand, true);
       put(worker_of(u), content_for(u), in_hand)
#else
    :: put(worker_of(u), content_for(u), in_hand);
       push(u, in_hand, true)
#endif
    fi
#ifdef COUNT_LAST
    ; sequence = following(sequence)
#endif
}

#if DEATHS
#define is_up(w) (!building[w])
#else
#define is_up(w) true
#endif

#if TRACES
#define may_tell(w) (is_up(w) && len(requests[w]) <= CAPACITY - OF_A_WORKER - 2)

/* caller.pyx: record, of one worker. */
inline record(w)
{
    if
    :: may_tell(w) ->
       traces++;
       sequence = following(sequence);
#ifdef TELL_FIRST
       requests[w]!TELL, sequence, true;
       put(w, TELL, sequence)
#else
       put(w, TELL, sequence);
       requests[w]!TELL, sequence, true
#endif
    :: true
    fi
}
#endif

/* caller.pyx: step, and the like.  What is asked of a worker that is being replaced would be lost:
 * exchange.py: _prepare. */
inline ask()
{
    calls++;
    do
    :: u < UNITS ->
       if
       :: state[u] == IDLE && is_up(worker_of(u)) -> post(u)
#ifdef PARTIAL
       :: true
#endif
       fi;
       u++
    :: else -> u = 0; break
    od
}

/* ---- taking -------------------------------------------------------------------------------- */

/* caller.pyx: record_answer */
inline record_answer(w)
{
    assert(worker_of(unit_of(content)) == w);
    assert(state[unit_of(content)] == OUT && numbers[unit_of(content)] == number);
    if
    :: late -> state[unit_of(content)] = OWED; owed[w]!content, number, late
    :: else -> state[unit_of(content)] = READY; answered[unit_of(content)] = content
    fi;
    content = 0; number = 0; late = false
}

/* caller.pyx: pop */
inline pop(w)
{
    d_step {
        nempty(completions[w]) ->
        completions[w]?content, number, late;
#ifdef POP_SPLIT
    };
    d_step {
#endif
        record_answer(w)
    }
}

/* recovery.py: _receive_messages, that is messages.pyx: find, of the first message that is owed, then
 * caller.pyx: deliver, and only then messages.pyx: take. */
inline fetch(w)
{
    d_step {
        nempty(inbox[w]) && nempty(owed[w]) ->
#ifdef TAKE_FIRST
        inbox[w]?content, number
    };
    d_step {
#else
        inbox[w]?<content, number>;
#endif
        owed[w]?<its_content, its_number, late>;
        if
#ifndef NO_SEQUENCE
        :: is_older(number, its_number)
#if !defined(NO_DROP_OLD) && !defined(TAKE_FIRST)
           -> inbox[w]?_, _
#endif
#endif
        :: else ->
#ifndef NO_SEQUENCE
           assert(number == its_number);
#endif
           if /* parcels.py: collect */
           :: lent[unit_of(its_content)] ->
              assert(depot[w] == its_content);
              depot[w] = 0;
              lent[unit_of(its_content)] = false
           :: else
           fi;
           owed[w]?_, _, _;
           state[unit_of(its_content)] = READY;
           answered[unit_of(its_content)] = content;
#ifndef TAKE_FIRST
           delivered = true
#endif
        fi;
        its_content = 0; its_number = 0
    };
#ifndef TAKE_FIRST
    if
    :: delivered -> d_step { inbox[w]?_, _; delivered = false }
    :: else
    fi
#endif
}

inline empty_out(channel)
{
    do
    :: nempty(channel) -> channel?_, _, _
    :: empty(channel) -> break
    od
}

/* caller.pyx: discard */
inline discard_all()
{
    d_step {
        i = 0;
        do
        :: i < UNITS -> state[i] = IDLE; numbers[i] = 0; asked[i] = 0; answered[i] = 0; i++
        :: else -> i = 0; break
        od;
        empty_out(owed[0]);
        empty_out(owed[WORKERS - 1])
    }
}

/* caller.pyx: commit */
inline commit()
{
    d_step {
        i = 0;
        do
        :: i < UNITS ->
           if
           :: state[i] == READY ->
              assert(answered[i] == asked[i]);
              state[i] = IDLE; numbers[i] = 0; asked[i] = 0; answered[i] = 0
           :: else
           fi;
           i++
        :: else -> i = 0; break
        od
    }
}

/* ---- workers that die ---------------------------------------------------------------------- */

#if DEATHS
/* caller.pyx: lose, and caller.pyx: renew */
inline lose(w)
{
    d_step {
        i = 0;
        do
        :: nempty(completions[w]) -> completions[w]?content, number, late; record_answer(w)
        :: empty(completions[w]) -> break
        od;
#ifndef TRUST_LATE
        do
        :: nempty(owed[w]) -> owed[w]?content, number, late; state[unit_of(content)] = OUT
        :: empty(owed[w]) -> break
        od;
        content = 0; number = 0; late = false;
#endif
        do
        :: i < UNITS ->
           if
           :: worker_of(i) == w && state[i] == OUT -> state[i] = LOST
           :: else
           fi;
           i++
        :: else -> i = 0; break
        od;
#if !defined(KEEP_RINGS) && !defined(RENEW_LATE)
        empty_out(requests[w])
#endif
    }
}

/* supervisor.py: begin_replacement, of a new process with a new channel. */
inline begin(w)
{
    d_step {
        i = 0;
#ifdef RENEW_LATE
        empty_out(requests[w]);
#endif
#ifndef KEEP_PIPE
        empty_out(down[w]);
        empty_out(up[w]);
#endif
#ifndef KEEP_CHANNEL
        empty_out(outbox[w]);
        do
        :: nempty(inbox[w]) -> inbox[w]?_, _
        :: empty(inbox[w]) -> break
        od;
        half[w] = false; half_content[w] = 0; half_number[w] = 0;
#endif
        depot[w] = 0;
        dead[w] = false;
        building[w] = true
    }
}

/* recovery.py: _continue_replacements.  It has taken what the dead one had to say, all or some of it. */
inline replace(w)
{
#ifdef LOSE_ONCE
    if
    :: !is_lost[w] ->
#endif
    do
    :: fill(w)
    :: pop(w)
    :: fetch(w)
    :: true -> break
    od;
    lose(w);
#ifdef LOSE_ONCE
       is_lost[w] = true
    :: else
    fi;
#endif
    begin(w)
}

/* supervisor.py: dead_workers */
inline look(w)
{
#if defined(EOF_AS_DEATH)
    dead[w] && !helper[w] -> replace(w)
#elif defined(LOOK_ONCE)
    dead[w] ->
    if
    :: !is_down[w] -> is_down[w] = true; replace(w); is_down[w] = false
    :: else
    fi
#else
    dead[w] -> replace(w)
#endif
}

#define may_revive(u) (state[u] == LOST && is_up(worker_of(u)))

/* caller.pyx: revive, of whatever is lost by now, and has a successor that is built. */
inline revive()
{
    do
    :: u < UNITS ->
       if
       :: may_revive(u) -> post(u)
       :: may_revive(u) -> d_step { state[u] = READY; answered[u] = asked[u] }
       :: !may_revive(u)
       fi;
       u++
    :: else -> u = 0; break
    od
}
#endif

/* ---- calls --------------------------------------------------------------------------------- */

#ifdef READ_LATE
inline fill_late(w)
{
    nempty(owed[w]) -> fill(w)
}
#endif

/* exchange.py: _wait, with caller.pyx: wait_for, caller.pyx: look_around and caller.pyx: pump. */
inline wait()
{
    do
    :: dropping && !any(OUT) && !(patient && any(OWED)) && is_up(0) && is_up(WORKERS - 1) -> break
    :: !dropping && !any(OUT) && !any(OWED) && !any(LOST) -> break
#ifdef PARTIAL
    :: !dropping && any(READY) -> break
#endif
    each(flush)
#ifdef READ_LATE
    each(fill_late)
#else
    each(fill)
#endif
    each(pop)
    each(fetch)
#if DEATHS
    each(look)
    :: !dropping && (may_revive(0) || may_revive(1) || may_revive(2)) -> revive()
#endif
    od
}

/* exchange.py: discard, caller.pyx: post, exchange.py: take; or without the first. */
inline call()
{
#if TRACES
    if
    :: traces < TRACES -> record(0)
#if WORKERS > 1
    :: traces < TRACES -> record(1)
#endif
    :: true
    fi;
#endif
#ifdef PARTIAL
    if
    :: dropping = true
    :: calls < CALLS -> ask()
    fi;
#else
    dropping = true;
#endif
    if
    :: dropping -> patient = true
    :: true
    fi;
waiting:
    wait();
    if
    :: dropping ->
       dropping = false;
       patient = false;
       discard_all();
       if
       :: calls == CALLS -> goto close
       :: else -> ask(); goto waiting
       fi
    :: else -> commit()
    fi
}

active proctype parent()
{
    byte sequence = SEQUENCES - 2; /* of the last request */
    byte calls, i, u, content, number, its_content, its_number;
#if TRACES
    byte traces;
#endif
    mtype part;
    bool dropping, patient, delivered, late;

    do
    :: {
        call()
    }
#if CTRL_C
    unless { /* spin tries this before each step of the above */
        d_step {
            interrupted ->
#ifdef HALF_READ
            half[0] = false; half[WORKERS - 1] = false;
#endif
#ifdef HALF_SENT
            if
            :: outbox[0]?[content, number, LAST] -> outbox[0]?content, number, part
            :: else
            fi;
#endif
#ifdef LOST_LOCAL
            i = 0;
            do
            :: i < UNITS ->
               if
               :: state[i] == LOST -> state[i] = OUT
               :: else
               fi;
               i++
            :: else -> i = 0; break
            od;
#endif
            interrupted = false;
            u = 0; content = 0; number = 0; part = 0;
            late = false; delivered = false; dropping = false; patient = false
        }
    }
#endif
    od;
close:
    do /* caller.pyx: ask_to_close */
    :: u < WORKERS ->
#if TRACES
       assert(nfull(requests[u]) && empty(completions[u]));
#else
       assert(empty(requests[u]) && empty(completions[u]));
#endif
       requests[u]!CLOSE, 0, false;
       u++
    :: else -> u = 0; break
    od;
    do /* supervisor.py: stop */
    :: u < WORKERS ->
       if
       :: ended[u] -> u++
#if DEATHS
       :: dead[u] -> u++
#endif
       each(flush)
       each(fill)
       fi
    :: else -> break
    od
}
