/* affinity.c — see affinity.h. */
#include "affinity.h"

#include <string.h>

/* The cores that this thread was last seen with, and whether they were all that it could have. */
static _Thread_local struct {
    cpu_set_t allowed;
    bool is_unrestricted;
} last_seen;

static bool get(cpu_set_t *cores)
{
    return sched_getaffinity(0, sizeof *cores, cores) == 0;
}

static bool set(const cpu_set_t *cores)
{
    return sched_setaffinity(0, sizeof *cores, cores) == 0;
}

static cpu_set_t all_cores(void)
{
    cpu_set_t all;
    memset(&all, 0xff, sizeof all);
    return all;
}

/* Whether the cores that are allowed now are all that could be; if so, all cores are requested. */
static bool request_all_cores(const cpu_set_t *allowed)
{
    cpu_set_t all = all_cores(), most;
    if (!set(&all))
        return false;
    if (get(&most) && CPU_EQUAL(&most, allowed))
        return true;
    set(allowed);
    return false;
}

static size_t nth_core(const cpu_set_t *cores, uint32_t skip)
{
    size_t core = 0;
    while (!CPU_ISSET(core, cores) || skip-- > 0)
        core++;
    return core;
}

void sv_affinity_narrow(sv_affinity *saved, uint32_t index)
{
    cpu_set_t allowed;
    saved->count = 0;
    if (!get(&allowed))
        return;
    int count = CPU_COUNT(&allowed);
    if (count < 2)
        return;
    if (!CPU_EQUAL(&allowed, &last_seen.allowed)) {
        last_seen.is_unrestricted = request_all_cores(&allowed);
        last_seen.allowed = allowed;
    }
    saved->restored = last_seen.is_unrestricted ? all_cores() : allowed;
    CPU_ZERO(&saved->home);
    CPU_SET(nth_core(&allowed, index % (uint32_t)count), &saved->home);
    if (set(&saved->home))
        saved->count = count;
}

void sv_affinity_widen(const sv_affinity *saved)
{
    cpu_set_t now, both;
    if (saved->count == 0 || !get(&now))
        return;
    CPU_AND(&both, &now, &saved->home);
    if (CPU_EQUAL(&now, &saved->home))
        set(&saved->restored);
    else if (CPU_COUNT(&both) == 0 && request_all_cores(&now)) /* its core has left the cpuset */
        set(&saved->restored);
}
