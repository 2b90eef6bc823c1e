/* wait.h — how long to pause, when to yield, when to park.
 *
 * A cache line travels between two cores in 0.1 µs; waking a sleeping process takes 5 to 40 µs.
 * So spinning is a hundred times cheaper than sleeping while a core is free, and ruinous (a scheduler
 * time slice, milliseconds) once more processes spin than there are cores.  So a wait goes through
 * three phases:
 *
 *     pause   spin on the core's pause instruction.  Only with a core to spare: the caller sets
 *             pause budget to 0 unless fewer participants can run than there are usable cores.
 *             Still, the scheduler may queue a worker behind the parent that spins for it, for a
 *             moment after a wake, and as long as another program keeps the other core busy.
 *             So a pausing waiter yields every 10 us.  While waits end in such a yield, because the
 *             core was given to the other side, only one wait in 64 pauses, as a probe.
 *     yield   spin on sched_yield: another process that wants this core gets it at once, so it is
 *             safe with every core taken; each yield costs 0.5 µs.
 *     park    sleep on a futex, in slices, so that the caller can look after signals, deadlines
 *             and dead peers between them.
 *
 * Budgets are in time.  Each waiter learns three numbers:
 *
 *     typical    how long its waits last (moving average).  If that is longer than a phase's budget,
 *                spinning is not worth it, and only a token spin is made.  (One yield may be enough:
 *                it gives the core to a process that has work, and returns when that is done.
 *                Without it CartPole with 32 envs takes 15 % longer.)
 *     park_cost  what a park costs, from the waker's clock reading to the sleeper's.  The length
 *                of a wait that ended in a park includes that park, so that much is allowed on top
 *                of the budget.  Otherwise a waiter that once began to park would never stop.
 *     yield_cost what a wait that ended in the yield phase cost, likewise.  It is nearly nothing as
 *                long as all processes that share the core are ours and yield, too.  But another
 *                program, or the threads of the parent's own linear algebra (OpenMP's spin for
 *                milliseconds after each loop), keep the core for a whole time slice when it is
 *                yielded to them.  A sleeper that is woken takes it from them at once (torch with
 *                two threads on two cores, an empty env: 830 µs a batch step yielding, 19 parking).
 *                While yields cost more than parks, waits yield only as probes, and ever more
 *                rarely as the probes fail.
 *
 * A waiter learns from every wait, spun or parked, and so adapts when the other side changes its pace:
 * a spin that ends in a park is wasted, but after a few of them the waiter makes only token spins.
 *
 * Which phases to use (measured, two workers on two cores, no work: µs a batch step).  A process that
 * spins must let processes run that have work.  Workers that pause keep a parent that yields off the
 * cores until they stop pausing (54); a parent that parks is woken late (12 to 25); when all yield,
 * the core passes between them at once (4).
 *
 * Where to wake up.  A worker that is woken while the parent still runs finds no idle core, and the
 * scheduler may queue it behind the other worker, since it does not know that the parent is about to
 * free its core: two workers then run one after the other, for as long as both park between steps
 * (HalfCheetah, 32 envs: 480 to 700 µs instead of 470).  So with as many workers as cores a worker is
 * `homing`: only while it sleeps it is bound to a core of its own (affinity.h).  Awake it may run
 * anywhere, and so may the threads and processes that its envs start.  While yields cost too much,
 * other processes use the cores, so no core belongs to a worker, and it sleeps unbound.
 *
 * When to wake up.  With as many workers as cores, the first core is free when one worker is done
 * and the others are not.  So the parent has itself woken when all requests but one are done, and
 * `linger`s, yielding, until the last one is.  It wakes up while the last worker still works, which
 * then makes no system call (5 % of a batch step of CartPole with 32 envs).
 *
 * Who stays awake.  With more workers than cores, another worker needs the core as soon as a worker
 * has answered, so the worker parks at once.  The exceptions are the last workers of a batch step, as
 * many as there are cores, whose cores no other worker needs.  They `linger`, yielding, while the
 * parent takes the results, so that no core falls asleep.  They begin the next step as soon as the
 * parent calls, while it still wakes the others (CartPole, 32 envs, on two cores: 9 to 15 % less time
 * with 3, 8 and 32 workers).  Most of what more workers than cores cost is not in their waits.  Each
 * process has its own copy of all memory that an interpreter touches, so env.step itself takes longer
 * after another process had the core: benchmarks/matrix.py settings --bound measures that.
 * These were tried, and are no better:
 *   - Workers that wake each other as they finish, one a core at a time.  That moves the wakes from the
 *     parent's hot loop to cold processes.  (The same with an order that is reversed at each step, so
 *     that workers that are awake come first: 1.4 times the time with 8 and 32 workers.)
 *   - Binding sleepers to cores as above, which takes four system calls a sleep.
 *   - A yield in the middle of a request, so that three workers share two cores evenly.
 *   - SCHED_BATCH for workers.
 *
 * Waking up in time.  A learner that computes 2 ms between steps, or an env that takes 1 ms, makes
 * waits that are too long to spin but of nearly the same length each time.  A waiter learns that
 * length and its mean deviation.  If these allow it, the waiter sleeps until shortly before the
 * predicted end, and yields from then on, so that it is awake when the other side calls (25 to 40 us
 * saved a step).  If the call does not come within the window, the waiter parks.
 *
 * How good that is.  A wait costs at most a wasted spin and a park.  If parking at once is best, that
 * is at most twice the cost (with the budgets of src/shmvec/_cores.py) in the few waits until the
 * lengths are learned, and a microsecond more from then on.  If spinning is best, waits spin.
 * benchmarks/matrix.py compares both fixed policies in every cell.
 *
 * What may change.  The budgets follow from the numbers of cores and workers, and the number of cores
 * changes with a quota, with an affinity, or when a container is moved.  The parent looks every second
 * and writes the workers' budgets to the segment, where each worker reads them when a wait begins.
 *
 * A waiter is private to its process; only the policy is shared.
 */
#ifndef SHMVEC_WAIT_H
#define SHMVEC_WAIT_H

#include "bell.h"
#include "completion.h"
#include "counters.h"
#include "ring.h"
#include "trace.h"

enum {
    SV_WAIT_READY = 1,       /* the wait was successful */
    SV_WAIT_SLICE = 0,       /* the slice is over: look around, then call again */
    SV_WAIT_CORRUPT = -1,    /* the segment is damaged */
};

/* The longest time that each phase may last, in ns; 0: the phase is skipped. */
typedef struct {
    int64_t pause;
    int64_t yield;
    int64_t linger; /* see "When to wake up" (parent), "Who stays awake" (workers) above */
    int64_t window; /* around the predicted end of a wait: see "Waking up in time" above */
} sv_budget;

/* The workers' budget, in the segment.  All accesses are relaxed: the numbers do not depend on each
 * other, and for one wait an old one is as good as a new one. */
typedef struct {
    alignas(SV_CACHE_LINE) _Atomic int64_t pause;
    _Atomic int64_t yield;
    _Atomic int64_t linger;
    _Atomic int64_t window;
    _Atomic uint32_t cores;  /* how many workers may linger */
    _Atomic uint32_t homing; /* not a bool, since a damaged segment may hold any value */
} sv_policy;

void sv_policy_set(sv_policy *policy, sv_budget budget, bool homing, uint32_t cores);

typedef struct {
    const sv_policy *policy; /* worker: the source of its budget; NULL: the budget is fixed */
    sv_budget budget;
    uint32_t cores;    /* worker: how many may linger */
    int64_t answers_left; /* worker: those its batch step lacked after its own; -1: no such step */
    bool homing;       /* worker: sleep bound to a core of its own */
    bool waits_early;  /* parent: the wait in progress sleeps for all requests but one */
    int64_t typical;   /* ns; learned: mean length of waits, long ones clipped */
    int64_t expected;  /* ns; learned: likewise, clipped at longer waits */
    int64_t deviation; /* ns; learned: mean deviation of waits from `expected` */
    int64_t park_cost;  /* ns; learned */
    int64_t yield_cost; /* ns; learned */
    int64_t handovers;    /* learned: how many waits of 1024 ended because the core was given away */
    uint32_t probe_every; /* waits between two probes while yields cost too much */
    uint32_t probe_in;    /* waits until the next probe; 0: yields are fine */
    int64_t since;     /* start of the wait in progress; 0: none */
    int64_t ended_at;    /* end of the last wait */
    sv_counts *counts;   /* the process's counts of its waits */
    int64_t *phase_ns;   /* the count of time in the phase in progress */
    int64_t phase_since; /* the begin of the phase in progress */
    sv_trace *trace;     /* records the phases; NULL: no trace */
} sv_waiter;

/* A waiter with a budget of its own, which counts its waits in `counts`. */
void sv_waiter_init(sv_waiter *waiter, sv_budget budget, bool homing, sv_counts *counts);

/* A waiter that follows a policy. */
void sv_waiter_follow(sv_waiter *waiter, const sv_policy *policy, sv_counts *counts);

/* Worker: waits until its request ring has a record, at most about slice_ns.  `index` is the
 * worker's, for its bit of the bell.  Call it again after SV_WAIT_SLICE: the wait goes on, parked. */
int sv_wait_request(sv_waiter *waiter, sv_bell *bell, sv_ring *requests, uint32_t index,
                    int64_t slice_ns);

/* Parent: waits until `target` requests are done, at most about slice_ns. */
int sv_wait_completion(sv_waiter *waiter, sv_completion *completion, uint32_t target,
                       int64_t slice_ns);

/* Internal, here for the tests.  Learns from a wait that ended in the yield phase, `cost` ns after it
 * could have. */
void sv_waiter_learn_yield(sv_waiter *waiter, int64_t cost);

/* Internal: whether the wait that begins may yield; counts down to the next probe. */
bool sv_waiter_may_yield(sv_waiter *waiter);

#endif
