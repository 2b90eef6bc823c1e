/* probe.c — measures what waking and handing over cost between two processes of this machine. */
#include "probe.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define START_NS INT64_C(20000000)   /* time for all players to get to their cores */
#define ASLEEP_NS INT64_C(10000000)  /* the longest sleep; then the player looks at the clock */

/* Memory that two players share; each writes the ball when it has it. */
typedef struct {
    alignas(SV_CACHE_LINE) _Atomic uint32_t ball; /* even: the first player has it */
    alignas(SV_CACHE_LINE) double round_ns;       /* the first player's result, read after its end */
} sv_court;

static bool bind_to(uint32_t core)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return core < CPU_SETSIZE && sched_setaffinity(0, sizeof cores, &cores) == 0;
}

static void *shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Forks a player onto a core.  Returns 0 in the player, -1 if there is none. */
static pid_t player(uint32_t core)
{
    pid_t caller = getpid(), pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != caller || !bind_to(core))
        _exit(1);
    return 0;
}

static void wait_for(pid_t pid)
{
    while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* Sleeps until it has the ball; false: the time is over. */
static bool await(sv_court *court, uint32_t turn, int64_t end)
{
    uint32_t seen;
    /* acquire: pairs with the other player's release of the ball, as a waiter's look at a ring does */
    while ((seen = atomic_load_explicit(&court->ball, memory_order_acquire)) != turn) {
        sv_futex_wait(&court->ball, seen, ASLEEP_NS, SV_EVERYONE);
        if (sv_now_ns() >= end)
            return false;
    }
    return true;
}

static void play(sv_court *court, uint32_t first_turn, int64_t end)
{
    int64_t start = 0;
    for (uint32_t turn = first_turn; await(court, turn, end); turn += 2) {
        if (turn == 2)
            start = sv_now_ns(); /* both players run: the measurement begins */
        if (turn > 2 && turn % 2 == 0) {
            int64_t now = sv_now_ns();
            court->round_ns = (double)(now - start) / (turn / 2 - 1);
            if (now >= end)
                return;
        }
        /* release: pairs with the acquire in await */
        atomic_store_explicit(&court->ball, turn + 1, memory_order_release);
        sv_futex_wake(&court->ball, SV_EVERYONE);
    }
}

double sv_probe_round_trip(uint32_t core, uint32_t other, int64_t duration_ns)
{
    sv_court *court = shared(sizeof *court);
    if (court == NULL)
        return 0;
    const uint32_t cores[] = {core, other};
    pid_t players[2];
    int64_t end = sv_now_ns() + START_NS + duration_ns;
    for (uint32_t i = 0; i < 2; i++) {
        players[i] = player(cores[i]);
        if (players[i] == 0) {
            play(court, i, end);
            _exit(0);
        }
    }
    wait_for(players[0]);
    wait_for(players[1]);
    double round_ns = court->round_ns;
    munmap(court, sizeof *court);
    return round_ns;
}

/* Computes until the time is over; the result keeps the compiler from leaving the work out. */
static double rate(int64_t start, int64_t end)
{
    while (sv_now_ns() < start)
        sv_pause();
    volatile uint32_t sum = 0;
    uint64_t done = 0;
    int64_t now = sv_now_ns();
    for (start = now; now < end; now = sv_now_ns(), done++)
        for (uint32_t i = 0; i < 1000; i++)
            sum += i;
    return now > start ? (double)done / (double)(now - start) : 0;
}

bool sv_probe_rates(const uint32_t *cores, uint32_t count, int64_t duration_ns, double *rates)
{
    size_t bytes = count * (sizeof *rates + sizeof(pid_t));
    double *found = shared(bytes);
    if (found == NULL)
        return false;
    pid_t *players = (pid_t *)(void *)(found + count);
    int64_t start = sv_now_ns() + START_NS;
    for (uint32_t i = 0; i < count; i++) {
        pid_t pid = player(cores[i]);
        if (pid == 0) {
            found[i] = rate(start, start + duration_ns);
            _exit(0);
        }
        players[i] = pid;
    }
    for (uint32_t i = 0; i < count; i++)
        wait_for(players[i]);
    for (uint32_t i = 0; i < count; i++)
        rates[i] = found[i];
    munmap(found, bytes);
    return true;
}

double sv_probe_clock(int64_t duration_ns)
{
    int64_t start = sv_now_ns(), now = start;
    uint64_t done = 0;
    for (; now < start + duration_ns; done++)
        now = sv_now_ns();
    return (double)(now - start) / (double)done;
}
