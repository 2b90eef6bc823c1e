/* test_watchdog.c — the parent is killed, and a worker in a busy loop and its family are gone. */
#include "watchdog.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"
#include "family.h"

static uint64_t mark; /* this run's own: another may run beside it */

/* What the processes of a family tell each other.  The test is grandparent and great-grandparent:
 * orphans become its children (PR_SET_CHILD_SUBREAPER), so it sees how they end. */
struct family {
    _Atomic int worker;
    _Atomic int helper;
    _Atomic bool watched; /* the watchdog runs */
    _Atomic bool orphan;  /* the parent is gone; who waits for it goes on */
    _Atomic bool left;    /* the helper has left the worker's group, if it was to */
    bool leads;           /* the worker, a group of its own */
    bool leaves;          /* the helper, that group */
    void (*live)(struct family *family, int parent); /* what the worker does; returns no more */
};

static int open_pidfd(pid_t process)
{
    return (int)syscall(SYS_pidfd_open, process, 0);
}

static void wait_for(_Atomic bool *flag)
{
    while (!atomic_load(flag))
        sv_yield();
}

static void be_stuck(void)
{
    for (;;)
        sv_pause();
}

/* How a process that is or became our child has ended: the signal, or 0. */
static int end_of(pid_t process)
{
    int status;
    CHECK(waitpid(process, &status, 0) == process);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void be_worker(struct family *family)
{
    int parent = open_pidfd(getppid());
    start_deadline();
    CHECK(parent >= 0);
    if (family->leads)
        CHECK(setpgid(0, 0) == 0 && sv_family_lead(mark) == 0);
    pid_t helper = fork();
    CHECK(helper >= 0);
    if (helper == 0) {
        start_deadline();
        if (family->leaves)
            CHECK(setsid() == getpid());
        atomic_store(&family->left, true);
        be_stuck();
    }
    wait_for(&family->left);
    atomic_store(&family->helper, helper);
    atomic_store(&family->worker, getpid());
    family->live(family, parent);
}

/* Starts a parent with a worker, in a group of their own, and kills the parent once the worker is
 * ready.  Returns the parent, which is its group's number, too. */
static pid_t orphan(struct family *family)
{
    pid_t parent = fork();
    CHECK(parent >= 0);
    if (parent == 0) {
        start_deadline();
        CHECK(setpgid(0, 0) == 0);
        pid_t worker = fork();
        CHECK(worker >= 0);
        if (worker == 0)
            be_worker(family);
        be_stuck();
    }
    wait_for(&family->watched);
    kill(parent, SIGKILL);
    CHECK(end_of(parent) == SIGKILL);
    atomic_store(&family->orphan, true);
    return parent;
}

static void watched_and_stuck(struct family *family, int parent)
{
    CHECK(sv_watchdog_start(parent, mark) == 0);
    atomic_store(&family->watched, true);
    be_stuck();
}

static void blocking_signals(struct family *family, int parent)
{
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGALRM); /* the deadline's */
    sigprocmask(SIG_SETMASK, &all, NULL);
    watched_and_stuck(family, parent);
}

/* As around a fork: the parent goes while nobody watches. */
static void stopped_meanwhile(struct family *family, int parent)
{
    CHECK(sv_watchdog_start(parent, mark) == 0);
    sv_watchdog_stop();
    atomic_store(&family->watched, true);
    wait_for(&family->orphan);
    CHECK(sv_watchdog_start(parent, mark) == 0);
    be_stuck();
}

/* A child inherits no watchdog, and stopping it there does nothing to the one of its parent. */
static void with_a_child(struct family *family, int parent)
{
    CHECK(sv_watchdog_start(parent, mark) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        sv_watchdog_stop();
        _exit(0);
    }
    CHECK(end_of(child) == 0);
    CHECK(sv_watchdog_start(parent, mark) == EBUSY);
    atomic_store(&family->watched, true);
    be_stuck();
}

/* The number of descriptors that a thread of this process has. */
static int count_descriptors(const char *thread)
{
    char path[300];
    int count = -2; /* . and .. */
    snprintf(path, sizeof path, "/proc/self/task/%s/fd", thread);
    DIR *folder = opendir(path);
    while (folder != NULL && readdir(folder) != NULL)
        count++;
    if (folder != NULL)
        closedir(folder);
    return count;
}

/* Whether the watchdog has a descriptor table of its own by now. */
static bool is_apart(void)
{
    bool apart = false;
    struct dirent *thread;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads != NULL);
    while ((thread = readdir(threads)) != NULL)
        apart |= thread->d_name[0] != '.' && count_descriptors(thread->d_name) == 1;
    closedir(threads);
    return apart;
}

/* An env that closes what is not its own. */
static void without_descriptor(struct family *family, int parent)
{
    CHECK(sv_watchdog_start(parent, mark) == 0);
    while (!is_apart())
        sv_yield();
    close(parent);
    atomic_store(&family->watched, true);
    be_stuck();
}

/* A pipe that the watchdog might keep open: the other end would not see that it was closed. */
static void test_other_descriptors(void)
{
    int ends[2], self = open_pidfd(getpid());
    char byte;
    CHECK(pipe(ends) == 0 && sv_watchdog_start(self, mark) == 0);
    while (!is_apart())
        sv_yield();
    close(ends[1]);
    CHECK(read(ends[0], &byte, 1) == 0);
    sv_watchdog_stop();
    close(ends[0]);
    close(self);
}

static void test_family(void (*live)(struct family *, int), bool leaves)
{
    struct family *family = shared_memory(sizeof *family);
    family->leads = true;
    family->leaves = leaves;
    family->live = live;
    orphan(family);
    CHECK(end_of(family->worker) == SIGKILL);
    CHECK(end_of(family->helper) == SIGKILL);
    munmap(family, sizeof *family);
}

/* A worker that leads no group ends alone. */
static void test_foreign_group(void)
{
    struct family *family = shared_memory(sizeof *family);
    family->live = watched_and_stuck;
    pid_t group = orphan(family);
    CHECK(end_of(family->worker) == SIGKILL);
    CHECK(getpgid(family->helper) == group);
    CHECK(waitpid(family->helper, NULL, WNOHANG) == 0);
    kill(family->helper, SIGTERM);
    CHECK(end_of(family->helper) == SIGTERM);
    munmap(family, sizeof *family);
}

/* How many threads the kernel knows of. */
static nlink_t count_threads(void)
{
    struct stat threads;
    CHECK(stat("/proc/self/task", &threads) == 0);
    return threads.st_nlink;
}

static void test_states(uint32_t rounds)
{
    int self = open_pidfd(getpid());
    CHECK(self >= 0);
    sv_watchdog_stop(); /* none runs */
    CHECK(sv_watchdog_start(-1, mark) == EBADF);
    CHECK(sv_watchdog_start(STDOUT_FILENO, mark) == EBADF);
    nlink_t threads = count_threads();
    for (uint32_t round = 0; round < rounds; round++) {
        CHECK(sv_watchdog_start(self, mark) == 0);
        CHECK(count_threads() == threads + 1);
        CHECK(sv_watchdog_start(self, mark) == EBUSY);
        sv_watchdog_stop();
        while (count_threads() != threads) /* who has joined it may still find it in /proc */
            sv_yield();
    }
    CHECK(sv_watchdog_start(self, mark) == 0);
    close(self); /* an env may close what is not its own */
    sv_watchdog_stop();
    sigset_t now;
    CHECK(sigprocmask(SIG_SETMASK, NULL, &now) == 0 && sigisemptyset(&now));
}

int main(int argc, char **argv)
{
    start_deadline();
    mark = UINT64_C(1) << 62 | (uint64_t)getpid() << 2 | 2;
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    test_family(watched_and_stuck, false);
    test_family(watched_and_stuck, true);
    test_family(blocking_signals, false);
    test_family(stopped_meanwhile, false);
    test_family(with_a_child, false);
    if (syscall(SYS_close_range, INT_MAX, INT_MAX, 0) == 0) {
        test_family(without_descriptor, false);
        test_other_descriptors();
    }
    test_foreign_group();
    test_states(rounds_of(argc, argv, 1000));
    return 0;
}
