/* test_family.c — all that a marked process has started ends, however it hides, and nobody else. */
#include "family.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "check.h"

static uint64_t family_mark, other_mark; /* this run's own: another may run beside it */

/* What members tell.  The test is the subreaper of them all, so it sees how they end. */
struct family {
    _Atomic int count;
    _Atomic int members[64];
    _Atomic bool go;
};

static struct family *shared;

static void be_a_member(void)
{
    start_deadline();
    atomic_store(&shared->members[atomic_fetch_add(&shared->count, 1)], getpid());
    for (;;)
        pause();
}

static pid_t forked(void (*body)(void))
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        start_deadline();
        body();
        _exit(0);
    }
    return child;
}

static void end_by(pid_t process, int number)
{
    int status;
    CHECK(waitpid(process, &status, 0) == process);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == number);
}

static void end_well(pid_t process)
{
    int status;
    CHECK(waitpid(process, &status, 0) == process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void in_another_session(void)
{
    CHECK(setsid() == getpid());
    be_a_member();
}

static void deaf(void)
{
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGALRM); /* the deadline's */
    sigprocmask(SIG_SETMASK, &all, NULL);
    be_a_member();
}

static void stopped(void)
{
    start_deadline();
    atomic_store(&shared->members[atomic_fetch_add(&shared->count, 1)], getpid());
    raise(SIGSTOP);
    for (;;)
        pause();
}

/* With no variable in its environment; it tells for the program that it becomes. */
static void executed(void)
{
    char *nothing[] = {NULL};
    CHECK(setsid() == getpid());
    atomic_store(&shared->members[atomic_fetch_add(&shared->count, 1)], getpid());
    execle("/bin/sleep", "sleep", "60", (char *)NULL, nothing);
    CHECK(false);
}

static void daemonised(void)
{
    CHECK(setsid() == getpid());
    forked(executed);
    forked(in_another_session);
}

static void wait_for(int members)
{
    while (atomic_load(&shared->count) < members)
        sv_yield();
}

/* A worker: one of each kind, then it does what is asked of it. */
static void start_family(void)
{
    CHECK(sv_family_lead(family_mark) == 0);
    forked(be_a_member);
    forked(in_another_session);
    forked(deaf);
    forked(stopped);
    forked(executed);
    end_well(forked(daemonised));
    wait_for(7);
}

static void lead_and_kill(void)
{
    start_family();
    sv_family_kill(family_mark);
    CHECK(sv_family_signal(&(uint64_t){family_mark}, 1, 0, 0) == 0);
}

static void lead_and_die(void)
{
    start_family();
    atomic_store(&shared->go, true);
    be_a_member();
}

/* Ends those with a mark from outside, as a parent does. */
static void end_all(uint64_t mark)
{
    uint64_t marks[] = {other_mark + 1, mark};
    while (sv_family_signal(marks, 2, SIGKILL, 0) > 0)
        sv_yield();
}

static bool lives(pid_t process)
{
    return waitpid(process, NULL, WNOHANG) == 0;
}

static void be_another(void)
{
    CHECK(sv_family_lead(other_mark) == 0);
    be_a_member();
}

/* It starts and starts, as long as it lives. */
static void breed(void)
{
    for (int i = 0; i < 1000; i++) {
        pid_t child = fork();
        if (child == 0) {
            setsid();
            if (fork() == 0)
                pause();
            _exit(0);
        }
    }
}

static void lead_a_breed(void)
{
    CHECK(sv_family_lead(family_mark) == 0);
    atomic_store(&shared->go, true);
    breed();
    be_a_member();
}

static void reset(void)
{
    memset(shared, 0, sizeof *shared);
}

/* Reaps what was handed to us, which must have ended by SIGKILL. */
static int reap_killed(void)
{
    int status, killed = 0;
    while (waitpid(-1, &status, 0) > 0)
        killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    CHECK(errno == ECHILD);
    return killed;
}

static void test_a_leader_kills_its_family(void)
{
    reset();
    end_well(forked(lead_and_kill));
    CHECK(reap_killed() == 7); /* the two daemons, and those that it has not waited for */
}

static void test_a_family_is_ended_after_its_leader(void)
{
    reset();
    pid_t leader = forked(lead_and_die);
    wait_for(8);
    kill(leader, SIGKILL);
    end_by(leader, SIGKILL);
    end_all(family_mark);
    CHECK(reap_killed() == 7);
}

static void test_nobody_else(void)
{
    reset();
    pid_t unmarked = forked(in_another_session), other = forked(be_another);
    wait_for(2);
    pid_t leader = forked(lead_and_die);
    wait_for(2 + 8);
    end_all(family_mark);
    end_by(leader, SIGKILL);
    CHECK(lives(unmarked) && lives(other));
    kill(unmarked, SIGTERM);
    end_by(unmarked, SIGTERM);
    CHECK(sv_family_signal(&(uint64_t){other_mark}, 1, 0, other) == 0); /* spared */
    CHECK(sv_family_signal(&(uint64_t){other_mark}, 1, SIGTERM, 0) == 1);
    end_by(other, SIGTERM);
    CHECK(reap_killed() == 7);
}

/* A zombie is nobody to wait for. */
static void test_the_dead(void)
{
    reset();
    pid_t other = forked(be_another);
    wait_for(1);
    kill(other, SIGKILL);
    siginfo_t ended;
    CHECK(waitid(P_PID, (id_t)other, &ended, WEXITED | WNOWAIT) == 0);
    CHECK(sv_family_signal(&(uint64_t){other_mark}, 1, SIGKILL, 0) == 0);
    end_by(other, SIGKILL);
}

static void test_those_who_multiply(uint32_t rounds)
{
    for (uint32_t round = 0; round < rounds; round++) {
        reset();
        pid_t leader = forked(lead_a_breed);
        while (!atomic_load(&shared->go))
            sv_yield();
        end_all(family_mark);
        end_by(leader, SIGKILL);
        reap_killed();
        CHECK(sv_family_signal(&(uint64_t){family_mark}, 1, 0, 0) == 0);
    }
}

static void without_room(void)
{
    struct rlimit low = {.rlim_cur = 1000, .rlim_max = 1000};
    CHECK(setrlimit(RLIMIT_LOCKS, &low) == 0);
    CHECK(sv_family_lead(family_mark) == EINVAL);
}

/* A program that somebody has marked starts what is to live on. */
static void opted_out(void)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_LOCKS, &limit) == 0 && limit.rlim_cur == other_mark);
    limit.rlim_cur = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_LOCKS, &limit) == 0);
    CHECK(sv_family_signal(&(uint64_t){other_mark}, 1, 0, 0) == 1); /* its parent only */
}

static void lead_and_let_go(void)
{
    CHECK(sv_family_lead(other_mark) == 0);
    end_well(forked(opted_out));
}

int main(int argc, char **argv)
{
    start_deadline();
    family_mark = UINT64_C(1) << 62 | (uint64_t)getpid() << 2;
    other_mark = family_mark + 1;
    shared = shared_memory(sizeof *shared);
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    test_a_leader_kills_its_family();
    test_a_family_is_ended_after_its_leader();
    test_nobody_else();
    test_the_dead();
    test_those_who_multiply(rounds_of(argc, argv, 20));
    end_well(forked(without_room));
    end_well(forked(lead_and_let_go));
    return 0;
}
