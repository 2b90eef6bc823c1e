/* test_affinity.c — what was allowed before a sleep is allowed after it, and what has come since.
 *
 * Few machines let a test change their cpusets, so most of it runs on a model of what Linux 6.2 and
 * later do, which stands in for the two system calls. */
#include "affinity.h"

#include <string.h>
#include <sys/syscall.h>

#include "check.h"

typedef uint32_t cores; /* a bit for each of the first few */

static struct {
    bool models; /* else the real one is asked */
    cores cpuset;
    cores asked; /* 0: nothing */
    int calls;   /* of sched_setaffinity */
} kernel;

static cores allowed(void)
{
    cores both = kernel.asked & kernel.cpuset;
    return both != 0 ? both : kernel.cpuset;
}

int sched_getaffinity(pid_t thread, size_t bytes, cpu_set_t *mask)
{
    cores now = allowed();
    memset(mask, 0, bytes);
    if (!kernel.models)
        return syscall(SYS_sched_getaffinity, thread, bytes, mask) < 0 ? -1 : 0;
    memcpy(mask, &now, sizeof now);
    return 0;
}

int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t *mask)
{
    cores asked;
    if (!kernel.models)
        return (int)syscall(SYS_sched_setaffinity, thread, bytes, mask);
    kernel.calls++;
    memcpy(&asked, mask, sizeof asked);
    if ((asked & kernel.cpuset) == 0) {
        errno = EINVAL;
        return -1;
    }
    kernel.asked = asked;
    return 0;
}

/* One sleep. */
static void sleep_at(uint32_t index)
{
    sv_affinity affinity;
    cores before = allowed();
    sv_affinity_narrow(&affinity, index);
    CHECK(affinity.count == __builtin_popcount(before) && __builtin_popcount(allowed()) == 1);
    CHECK((allowed() & before) == allowed());
    sv_affinity_widen(&affinity);
}

static void the_cpuset_grows(void *unused)
{
    sv_affinity affinity;
    (void)unused;
    kernel.cpuset = 0x3;
    sleep_at(1);
    CHECK(allowed() == 0x3);
    kernel.cpuset = 0xf; /* awake */
    CHECK(allowed() == 0xf);
    sv_affinity_narrow(&affinity, 2);
    CHECK(allowed() == 0x4);
    kernel.cpuset = 0x3f; /* asleep */
    CHECK(allowed() == 0x4);
    sv_affinity_widen(&affinity);
    CHECK(allowed() == 0x3f);
    kernel.cpuset = 0x7; /* shrinks, and grows again */
    sleep_at(7);
    kernel.cpuset = 0xff;
    CHECK(allowed() == 0xff);
    sleep_at(7);
    CHECK(allowed() == 0xff);
}

static void a_restricted_one_stays_so(void *unused)
{
    (void)unused;
    kernel.cpuset = 0xff;
    kernel.asked = 0x6;
    sleep_at(0);
    CHECK(allowed() == 0x6);
    kernel.cpuset = 0xfff;
    CHECK(allowed() == 0x6);
    kernel.calls = 0;
    sleep_at(1); /* does not try again */
    CHECK(allowed() == 0x6 && kernel.calls == 2);
}

static void restricted_later(void *unused)
{
    (void)unused;
    kernel.cpuset = 0x3;
    sleep_at(0);
    kernel.cpuset = 0xf;
    sleep_at(0);
    kernel.calls = 0;
    sleep_at(0);
    CHECK(allowed() == 0xf && kernel.calls == 2);
    kernel.asked = 0x3; /* which was everything once */
    sleep_at(0);
    CHECK(allowed() == 0x3);
    kernel.asked = 0xff; /* and no longer */
    sleep_at(0);
    kernel.cpuset = 0x1f;
    CHECK(allowed() == 0x1f);
}

static void changed_by_somebody_else_during_the_sleep(void *unused)
{
    const cores masks[] = {0xc, 0x3, 0x2, 0x7};
    (void)unused;
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        sv_affinity affinity;
        kernel.cpuset = 0xf;
        kernel.asked = 0;
        sv_affinity_narrow(&affinity, 0);
        kernel.asked = masks[i];
        sv_affinity_widen(&affinity);
        CHECK(kernel.asked == masks[i]);
    }
}

static void its_core_leaves_the_cpuset(void *unused)
{
    sv_affinity affinity;
    (void)unused;
    kernel.cpuset = 0x3;
    sv_affinity_narrow(&affinity, 0);
    kernel.cpuset = 0x2;
    sv_affinity_widen(&affinity);
    CHECK(allowed() == 0x2);
    kernel.cpuset = 0x3; /* and comes back */
    CHECK(allowed() == 0x3);
}

static void its_core_leaves_the_cpuset_of_a_restricted_one(void *unused)
{
    sv_affinity affinity;
    (void)unused;
    kernel.cpuset = 0xf;
    kernel.asked = 0x3;
    sv_affinity_narrow(&affinity, 0);
    kernel.cpuset = 0xe;
    sv_affinity_widen(&affinity);
    CHECK(allowed() == 0x2);
    kernel.cpuset = 0xf;
    CHECK(allowed() == 0x3);
    sv_affinity_narrow(&affinity, 0);
    kernel.cpuset = 0xc; /* none of its cores is left */
    sv_affinity_widen(&affinity);
    CHECK(allowed() == 0xc);
}

static void one_core(void *unused)
{
    sv_affinity affinity;
    (void)unused;
    kernel.cpuset = 0x4;
    sv_affinity_narrow(&affinity, 3);
    sv_affinity_widen(&affinity);
    CHECK(affinity.count == 0 && kernel.calls == 0);
}

static void on_the_real_kernel(void *unused)
{
    cpu_set_t before, now;
    sv_affinity affinity;
    (void)unused;
    kernel.models = false;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    for (uint32_t index = 0; index < 5; index++) {
        sv_affinity_narrow(&affinity, index);
        CHECK(sched_getaffinity(0, sizeof now, &now) == 0);
        CHECK(CPU_COUNT(&now) == 1);
        sv_affinity_widen(&affinity);
        CHECK(sched_getaffinity(0, sizeof now, &now) == 0);
        CHECK(CPU_EQUAL(&before, &now));
    }
    if (CPU_COUNT(&before) < 2)
        return;
    /* What somebody else sets meanwhile is respected. */
    cpu_set_t other;
    sv_affinity_narrow(&affinity, 0);
    CPU_XOR(&other, &before, &affinity.home);
    CHECK(sched_setaffinity(0, sizeof other, &other) == 0);
    sv_affinity_widen(&affinity);
    CHECK(sched_getaffinity(0, sizeof now, &now) == 0);
    CHECK(CPU_EQUAL(&now, &other));
}

int main(void)
{
    void (*const tests[])(void *) = {
        the_cpuset_grows,
        a_restricted_one_stays_so,
        restricted_later,
        changed_by_somebody_else_during_the_sleep,
        its_core_leaves_the_cpuset,
        its_core_leaves_the_cpuset_of_a_restricted_one,
        one_core,
        on_the_real_kernel,
    };
    start_deadline();
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        runner thread; /* which knows nothing yet */
        memset(&kernel, 0, sizeof kernel);
        kernel.models = true;
        run(&thread, false, tests[i], NULL);
        join(&thread);
    }
    return 0;
}
