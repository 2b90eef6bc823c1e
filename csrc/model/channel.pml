/* channel.pml — control channels, deaths and Ctrl-C, for spin to check exhaustively.
 *
 * What is modelled.  A parent and a few workers; between the parent and each of them the two rings,
 * as channels that lose nothing (that they are is shown by protocol.pml), and a socket that holds
 * PIPE parts of messages each way.  A message has two parts, so that it may be read, written and
 * lost by halves.  With PIPE=1 none fits the socket; with PIPE=2 one does.
 *
 * Both directions: a request may have a message (a command, actions that did not fit the ring),
 * which the parent puts into its channel before the request; an answer may have one (results,
 * errors, infos that did not fit), which the worker sends after the answer.  Every message has the
 * sequence number of its request.  The parent keeps what the socket does not take (messages.pyx),
 * and reads and writes all channels whenever it waits (caller.pyx).  A worker waits for the message
 * of the request that it works on, and until all of its own has been written.
 *
 * The parent makes CALLS calls, one after the other, and then closes.  A call first drops what
 * calls before have left, then asks each unit something and takes all answers (caller.pyx); with
 * -DPARTIAL it may ask some units only, take those that have answered, and leave the rest to the
 * next call.  Unit u is of worker u mod WORKERS: all its envs, or one of them.
 *
 * Ctrl-C comes up to CTRL_C times, before any step of a call: the rest of the call does not happen,
 * and its local variables are gone.  Workers die, DEATHS in all: any of them, at any step, while
 * their successors are built, too, and several at a time.  The parent takes what the dead one has
 * answered in whole, notes the rest as lost, and starts a successor with new rings and a new
 * channel; then it asks for what was lost again, or answers for it (supervisor.py, recovery.py).
 * The worker is here; the parent is in exchange.pml.
 *
 * Up to TRACES times the parent tells a worker of a trace, at the beginning of a call, whatever is out:
 * a request with a message that nobody answers.  Of what was set for automatic resets it tells them
 * in the same way, at most once with each request, before that (caller.pyx: publish_settings).
 *
 * `name()` in a comment is a C function and `file: name` a method elsewhere; a test looks whether
 * they still exist.
 *
 * What is left out, and why that hides nothing.
 *   - Sleeping and waking: see protocol.pml.  Here whoever can go on does so some time.
 *   - The order in which a wait looks after channels, rings and workers: here it is any order, one
 *     part of a message at a time.
 *   - That `put` writes at once what there is room for: here the next wait does.  That a worker
 *     reads while it writes, and further than what it waits for: without that it is blocked more.
 *   - What the parent does without a chance for Ctrl-C.  In the code a signal's handler runs
 *     between two bytecodes or where PyErr_CheckSignals is called, so that one call of the ledger
 *     or of a channel is one step.  Most are one step here as well; `post` is more, and right.
 *   - Whether a drop waits for the messages of answers that it has already: here it may (`patient`)
 *     or leave them to be dropped by their numbers.
 *   - That a worker's memory for large results has room for several: here for those of one request.
 *     It is lent with a request, if none of the worker's other units is out, and is the worker's
 *     until the parent has what it has written there (parcels.py).
 *   - Sockets that are closed: nobody takes that for a death, but with -DEOF_AS_DEATH.
 *   - Numbers are counted as in the code, but wrap at 16; they begin just before that.
 *
 * What is checked.
 *   - What is read from the memory for large results is what was written there for that request.
 *   - No deadlock: there is no state but the last in which nobody can go on ("invalid end state").
 *     That goes for the end, too: all live workers have closed, none of them blocked in a send.
 *   - All runs end: there is no way to go round in circles ("non-progress cycle").
 *   - Each request that was asked is answered once, with what it was asked, or is lost and asked
 *     again or answered by the parent, or dropped.  No message is taken for another's, or for a
 *     part of another: assertions in receive, fill, record_answer, fetch and commit, and at the end.
 *   - No ring and no inbox overflows.
 *
 * How to run it, in an empty folder, for pan leaves many files:
 *     spin -a -DCTRL_C=1 .../csrc/model/channel.pml
 *     gcc -O2 -w -DCOLLAPSE -DSAFETY -o pan pan.c && ./pan
 * For circles, which takes longer: -DNP in place of -DCOLLAPSE -DSAFETY, then `./pan -l`.  After an
 * error `spin -k channel.pml.trail -p -g`, with the same -D and file, shows how it came about.
 * tests/csrc/test_model.py has the sizes that are checked.
 *
 * Each of these switches makes one mistake, and the test fails unless spin finds it.
 *   NO_SEQUENCE      messages have no numbers: the next one is taken, whatever it belongs to
 *   COMPARE_PLAINLY  numbers are compared as if they did not wrap
 *   COUNT_LAST       a number is counted as used after the request: Ctrl-C before that, and the
 *                    next request has the same one
 *   NO_DROP_OLD      the parent waits for a message behind one that nobody will take
 *   NO_DROP_ORPHAN   so does a worker, behind one whose request Ctrl-C has prevented
 *   PUSH_FIRST       the request is pushed before its message is put: Ctrl-C in between
 *   TELL_FIRST       likewise the request that tells of a trace
 *   BLOCKING_SEND    the parent waits until a message of its own has been written
 *   READ_LATE        it reads a channel only if it waits for a message
 *   HALF_READ        Ctrl-C forgets a message that was read by half
 *   HALF_SENT        Ctrl-C forgets the rest of a message that was written by half
 *   POP_SPLIT        Ctrl-C between taking an answer and noting it
 *   TAKE_FIRST       Ctrl-C between taking a message and noting it
 *   EOF_AS_DEATH     a death is noticed when the socket's other end is closed: a helper holds it
 *   TRUST_LATE       an answer of the dead is waited for though its message is lost
 *   LOOK_ONCE        a worker that is being replaced is not looked after: Ctrl-C, and nobody goes
 *                    on with it
 *   LOSE_ONCE        what is lost is noted once: Ctrl-C then, and what the next call puts into the
 *                    old channel never comes
 *   LOST_LOCAL       what was lost is known only to the call that has noticed it: Ctrl-C
 *   RENEW_LATE       what is lost is noted before the rings are renewed: Ctrl-C in between
 *   LEND_ALWAYS      the memory for large results is lent again before it was read
 *   KEEP_RINGS       the successor gets the rings as they are
 *   KEEP_PIPE        it gets the socket as it is
 *   KEEP_CHANNEL     it gets a new socket, but the parent keeps what it has read and not written
 */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef UNITS
#define UNITS WORKERS
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef CTRL_C
#define CTRL_C 0
#endif
#ifndef TRACES
#define TRACES 0
#endif
#ifndef PIPE
#define PIPE 1
#endif

#define MOST_UNITS 3
#define OF_A_WORKER ((UNITS + WORKERS - 1) / WORKERS) /* units */
#if TRACES
#define CAPACITY (2 * OF_A_WORKER + 2) /* of a ring */
#else
#define CAPACITY OF_A_WORKER
#endif
#define worker_of(unit) ((unit) % WORKERS)

/* What a unit is asked in a call.  Requests, answers and messages carry it for assertions only. */
#define content_for(unit) ((unit) + MOST_UNITS * calls)
#define unit_of(content) ((content) % MOST_UNITS)
#define CLOSE 255
#define TELL 254

/* Sequence numbers; 2**32 in the code. */
#define SEQUENCES 16
#define following(number) (((number) + 1) & (SEQUENCES - 1))
#ifdef COMPARE_PLAINLY
#define is_older(number, than) ((number) < (than))
#else
#define is_older(number, than) ((((number) - (than)) & (SEQUENCES - 1)) >= SEQUENCES / 2)
#endif

mtype = { FIRST, LAST, REPORT };          /* parts of a message; a report has only one */
mtype = { IDLE, OUT, OWED, READY, LOST }; /* states of a unit; OWED: answered, but for a message */

/* The rings: content, number, whether a message belongs to the record. */
chan requests[WORKERS] = [CAPACITY] of { byte, byte, bool };
chan completions[WORKERS] = [CAPACITY] of { byte, byte, bool };

/* The sockets, to and from each worker: content, number, part. */
chan down[WORKERS] = [PIPE] of { byte, byte, mtype };
chan up[WORKERS] = [PIPE] of { byte, byte, mtype };

/* The memory for large results, which only a worker writes; to which requests it is lent. */
byte depot[WORKERS];
bool lent[MOST_UNITS];

/* The kernel: who has ended, who is to be killed, whether the parent has got a signal. */
bool ended[WORKERS];
#if DEATHS
bool dead[WORKERS];
bool doomed[WORKERS];
#endif
#if CTRL_C
bool interrupted;
#endif
#ifdef EOF_AS_DEATH
bool helper[WORKERS];
#endif

/* ---- a worker ----------------------------------------------------------------------------- */

/* Waits for the message of the request that it works on, which is the next one that is not older. */
inline receive()
{
    do
    :: message ->
       d_step {
           down[_pid]?first, its_number, part;
           assert(part == FIRST);
           part = 0
       };
       d_step {
           down[_pid]?last, other_number, part;
           assert(part == LAST && last == first && other_number == its_number);
           if
#ifndef NO_SEQUENCE
           :: is_older(its_number, number)
#ifdef NO_DROP_ORPHAN
              -> assert(false)
#endif
           :: else -> message = false; assert(its_number == number && first == content)
#else
           :: true -> message = false; assert(first == content)
#endif
           fi;
           first = 0; its_number = 0; last = 0; other_number = 0; part = 0
       }
    :: else -> break
    od
}

/* worker.pyx: complete, and then worker.pyx: send_late */
inline answer()
{
    if
    :: completions[_pid]!content, number, false
    :: if /* parcels.py: pack */
       :: lent[unit_of(content)] -> depot[_pid] = content
       :: else
       fi;
       completions[_pid]!content, number, true;
       up[_pid]!content, number, FIRST;
       up[_pid]!content, number, LAST
    fi
}

/* worker.pyx: serve */
active [WORKERS] proctype worker() /* _pid: 0 to WORKERS - 1 */
{
    byte content, number, first, its_number, last, other_number;
    mtype part;
    bool message;
#if DEATHS
    bool successor;
serve:
#endif
    {
#if DEATHS
        if
        :: successor -> up[_pid]!0, 0, REPORT
        :: else
        fi;
#endif
        do
        :: requests[_pid]?content, number, message ->
           if
           :: content == CLOSE -> break
           :: else
           fi;
#ifdef EOF_AS_DEATH
           if
           :: helper[_pid] = true
           :: true
           fi;
#endif
           receive();
#if TRACES
           if /* worker.pyx: execute */
           :: content == TELL
           :: else -> answer()
           fi;
#else
           answer();
#endif
           d_step { content = 0; number = 0 }
        od;
        ended[_pid] = true
    }
#if DEATHS
    unless { /* spin tries this before each step of the above */
        d_step {
            doomed[_pid] ->
            doomed[_pid] = false;
            dead[_pid] = true;
            successor = true;
            content = 0; number = 0; first = 0; its_number = 0; message = false
        };
end_dead:
        !dead[_pid];
        goto serve
    }
#endif
}

#if DEATHS || CTRL_C
/* What befalls them, at any time, or never. */
active proctype fate()
{
#if DEATHS
    byte deaths = DEATHS;
#endif
#if CTRL_C
    byte interrupts = CTRL_C;
#endif

    do
#if DEATHS
    :: d_step { deaths > 0 && !doomed[0] -> deaths--; doomed[0] = true }
#if WORKERS > 1
    :: d_step { deaths > 0 && !doomed[1] -> deaths--; doomed[1] = true }
#endif
#endif
#if CTRL_C
    :: d_step { interrupts > 0 && !interrupted -> interrupts--; interrupted = true }
#endif
    :: true -> break
    od
}
#endif

#include "exchange.pml"
