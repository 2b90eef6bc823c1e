/* handler.c — see handler.h. */
#include "handler.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static void (*inner_handler)(int);
static int output;
static dev_t device;
static ino_t inode;
static uintptr_t unready_code;
static size_t unready_bytes;

static const off_t max_bytes = 1 << 18; /* more than a stack has */

/* Whether the descriptor still means the file, which is emptied if it has become long. */
static bool is_same_file(void)
{
    struct stat status;
    if (fstat(output, &status) != 0 || status.st_dev != device || status.st_ino != inode)
        return false;
    if (status.st_size > max_bytes && ftruncate(output, 0) != 0)
        return false;
    return true;
}

/* Whether the handler has interrupted a change of the stack that it would read. */
static bool is_unready(const void *context)
{
    const ucontext_t *interrupted = context;
#if defined(__x86_64__)
    uintptr_t at = (uintptr_t)interrupted->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    uintptr_t at = interrupted->uc_mcontext.pc;
#else
    (void)interrupted;
    uintptr_t at = unready_code + unready_bytes;
#endif
    return at - unready_code < unready_bytes;
}

static void guarded_handler(int number, siginfo_t *info, void *context)
{
    (void)info;
    int saved_errno = errno;
    pid_t process = getpid();
    if (syscall(SYS_gettid) != process) {
        syscall(SYS_tgkill, process, process, number);
    } else if (is_same_file()) {
        bool ready = !is_unready(context);
        if (ready)
            inner_handler(number);
        ssize_t ignored = write(output, ready ? "" : "\1", ready ? 1 : 2);
        (void)ignored;
    }
    errno = saved_errno;
}

int sv_handler_guard(int number, int descriptor, const void *code, size_t bytes)
{
    struct sigaction action;
    struct stat status;
    if (sigaction(number, NULL, &action) != 0 || fstat(descriptor, &status) != 0)
        return errno;
    bool is_ours = (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == guarded_handler;
    if (!is_ours
        && ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler == SIG_DFL
            || action.sa_handler == SIG_IGN))
        return EINVAL;
    output = descriptor;
    device = status.st_dev;
    inode = status.st_ino;
    unready_code = (uintptr_t)code;
    unready_bytes = bytes;
    if (is_ours)
        return 0;
    inner_handler = action.sa_handler;
    action.sa_sigaction = guarded_handler;
    action.sa_flags |= SA_SIGINFO;
    return sigaction(number, &action, NULL) == 0 ? 0 : errno;
}
