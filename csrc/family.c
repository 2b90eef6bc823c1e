/* family.c — finds and ends all processes that carry a mark; family.h says how they get it. */
#include "family.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "platform.h"

#define KILL_TIMEOUT_NS (SV_NS_PER_S / 2)
#define PAUSE_NS (SV_NS_PER_S / 1000)
#define REAP (-1)   /* in place of a signal: wait for those that have ended */
#define BY_PIDFD 3 /* P_PIDFD, which older headers lack */

_Static_assert(sizeof(rlim_t) == 8, "a mark has 62 bits");

int sv_family_lead(uint64_t mark)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_LOCKS, &limit) != 0)
        return errno;
    limit.rlim_cur = mark;
    return setrlimit(RLIMIT_LOCKS, &limit) == 0 ? 0 : errno;
}

static bool is_marked(pid_t process, const uint64_t *marks, uint32_t count)
{
    struct rlimit limit;
    if (prlimit(process, RLIMIT_LOCKS, NULL, &limit) != 0)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (limit.rlim_cur == marks[i])
            return true;
    return false;
}

/* Sends a signal to a process if it has one of the marks, or waits for it; returns whether it lives. */
static bool signal_if_marked(pid_t process, const uint64_t *marks, uint32_t count, int number)
{
    if (!is_marked(process, marks, count))
        return false;
    int pidfd = (int)syscall(SYS_pidfd_open, process, 0);
    if (pidfd < 0)
        return errno != ESRCH && errno != EINVAL; /* without a free descriptor: it may live */
    struct pollfd end = {.fd = pidfd, .events = POLLIN};
    bool is_same = is_marked(process, marks, count);
    bool is_alive = is_same && poll(&end, 1, 0) == 0;
    if (is_same && number == REAP)
        syscall(SYS_waitid, BY_PIDFD, pidfd, NULL, WEXITED | WNOHANG | __WALL, NULL);
    else if (is_alive && number != 0)
        syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0);
    close(pidfd);
    return is_alive;
}

/* The number that a name consists of; 0 if it is none. */
static pid_t parse_process_id(const char *name)
{
    pid_t number = 0;
    for (; *name != '\0'; name++) {
        if (*name < '0' || *name > '9')
            return 0;
        number = number * 10 + (*name - '0');
    }
    return number;
}

/* Scans all processes once. */
static uint32_t scan_processes(const uint64_t *marks, uint32_t count, int number, pid_t spared)
{
    /* getdents64, since opendir allocates: the thread that holds the allocator's lock may be stuck. */
    struct entry {
        uint64_t inode;
        int64_t next;
        uint16_t bytes;
        uint8_t type;
        char name[];
    };
    /* Small: a process that is listed, then starts another one and ends before we look at it, hides
     * that one.  The next part of the list begins at the next id, and new processes mostly have
     * higher ones. */
    alignas(8) char entries[1024];
    uint32_t living = 0;
    pid_t self = getpid();
    int processes = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (processes < 0)
        return 0;
    for (;;) {
        long bytes = syscall(SYS_getdents64, processes, entries, sizeof entries);
        if (bytes <= 0)
            break;
        for (long at = 0; at < bytes;) {
            uint16_t length;
            memcpy(&length, entries + at + offsetof(struct entry, bytes), sizeof length);
            pid_t process = parse_process_id(entries + at + offsetof(struct entry, name));
            if (process > 0 && process != self && process != spared)
                living += signal_if_marked(process, marks, count, number);
            at += length;
        }
    }
    close(processes);
    return living;
}

uint32_t sv_family_signal(const uint64_t *marks, uint32_t count, int number, pid_t spared)
{
    uint32_t living = scan_processes(marks, count, number, spared);
    return living > 0 ? living : scan_processes(marks, count, number, spared);
}

void sv_family_reap(const uint64_t *marks, uint32_t count)
{
    int adopts = getpid() == 1;
    if (!adopts)
        prctl(PR_GET_CHILD_SUBREAPER, &adopts);
    if (adopts)
        scan_processes(marks, count, REAP, 0);
}

void sv_family_kill(uint64_t mark)
{
    int64_t deadline = sv_now_ns() + KILL_TIMEOUT_NS;
    while (sv_family_signal(&mark, 1, SIGKILL, 0) > 0 && sv_now_ns() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}
