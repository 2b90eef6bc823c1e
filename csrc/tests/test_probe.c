/* test_probe.c — every price is found where there are cores for it, and nobody waits for ever. */
#include "probe.h"

#include "check.h"

#define DURATION_NS 20000000

static uint32_t cores_of(uint32_t *found)
{
    cpu_set_t cores;
    uint32_t count = 0;
    CHECK(sched_getaffinity(0, sizeof cores, &cores) == 0);
    for (uint32_t core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &cores))
            found[count++] = core;
    return count;
}

static void test_round_trips(const uint32_t *cores, uint32_t count)
{
    double ns = 0;
    while (ns == 0) /* others may have had the cores all the time */
        ns = sv_probe_round_trip(cores[0], cores[count > 1 ? 1 : 0], DURATION_NS);
    CHECK(ns > 0 && ns < DURATION_NS * 10.);
}

/* A core that does not exist: its player ends, and the other gives up in time. */
static void test_missing_core(uint32_t core)
{
    CHECK(sv_probe_round_trip(core, CPU_SETSIZE, DURATION_NS) == 0);
    const uint32_t cores[] = {core, CPU_SETSIZE};
    double rates[2];
    do {
        CHECK(sv_probe_rates(cores, 2, DURATION_NS, rates));
        CHECK(rates[1] == 0);
    } while (rates[0] == 0);
}

static void test_rates(const uint32_t *cores, uint32_t count)
{
    double rates[CPU_SETSIZE];
    for (uint32_t i = 0; i < count;) {
        if (i == 0)
            CHECK(sv_probe_rates(cores, count, DURATION_NS, rates));
        i = rates[i] > 0 ? i + 1 : 0;
    }
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

int main(void)
{
    uint32_t cores[CPU_SETSIZE], count = cores_of(cores);
    start_deadline();
    test_round_trips(cores, count);
    test_missing_core(cores[0]);
    test_rates(cores, count < 4 ? count : 4);
    CHECK(sv_probe_clock(DURATION_NS) > 0);
    return 0;
}
