/* Preloaded into a process (LD_PRELOAD), this counts the calls that change files below one folder, records them, and
 * makes one of them fail or kills the process in front of it. Everything else goes straight to the kernel.
 *
 * rig.py arms it through ctypes. A record of the trace is one line
 *     OP TAB ERRNO TAB OFFSET TAB LENGTH OF PATH TAB LENGTH OF SECOND PATH TAB LENGTH OF DATA NEWLINE
 * and then both paths and the data. Calls that fail are recorded, too, so that the n-th record is the n-th call.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum fault { NONE, KILL, TORN, FULL_ONCE, FULL, BROKEN, SHORT };
enum answer { GO, FAIL, HALF };

static char root[PATH_MAX], wanted[256];
static enum fault fault;
static long at, calls;
static int armed, trace = -1, with_data;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ------------------------------------------------------------------------------------------- what rig.py calls */

/* From now on watch the calls below `folder`. `fault` happens at the `number`-th call whose path contains `text` (all
 * contain ""). Records go to the descriptor `to` (-1: none), with all calls and their data, or only with marks. */
void rig_arm(const char *folder, const char *text, int kind, long number, int to, int all)
{
    snprintf(root, sizeof root, "%s/", folder);
    snprintf(wanted, sizeof wanted, "%s", text);
    fault = kind, at = number, calls = 0, trace = to, with_data = all, armed = 1;
}

long rig_calls(void) { return calls; }

static void put(const void *data, size_t length)
{
    for (const char *p = data; length;) {
        ssize_t n = syscall(SYS_write, trace, p, length);
        if (n < 0) _exit(99);
        p += n, length -= n;
    }
}

static void record(const char *op, int error, const char *path, const char *second, off_t offset, const void *data,
                   size_t length)
{
    if (trace < 0 || !(with_data || !strcmp(op, "mark"))) return;
    char line[128];
    int n = snprintf(line, sizeof line, "%s\t%d\t%lld\t%zu\t%zu\t%zu\n", op, error, (long long)offset, strlen(path),
                     strlen(second), length);
    put(line, n), put(path, strlen(path)), put(second, strlen(second)), put(data, length);
}

/* A note in the trace, such as that an edit was acknowledged. It is no call and is not counted. */
void rig_mark(const char *text)
{
    pthread_mutex_lock(&lock);
    record("mark", 0, text, "", 0, "", 0);
    pthread_mutex_unlock(&lock);
}

/* ------------------------------------------------------------------------------------------- paths and faults */

static void of_descriptor(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void absolute(int folder, const char *name, char *path)
{
    char base[PATH_MAX] = "";
    if (name[0] != '/') {
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) base[0] = 0; }
        else of_descriptor(folder, base);
        strncat(base, "/", sizeof base - strlen(base) - 1);
    }
    if ((size_t)snprintf(path, PATH_MAX, "%s%s", base, name) >= PATH_MAX) path[0] = 0;
}

static int below(const char *path)
{
    size_t n = strlen(root) - 1;
    return armed && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

/* What becomes of the next call. `grows`: it needs room on the disk. */
static enum answer decide(const char *path, int grows)
{
    if (!strstr(path, wanted)) return GO;
    calls++;
    if (fault == FULL && calls >= at && grows) { errno = ENOSPC; return FAIL; }
    if (calls != at) return GO;
    switch (fault) {
    case KILL: syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause();
    case FULL_ONCE: if (!grows) return GO; errno = ENOSPC; return FAIL;
    case BROKEN: errno = EIO; return FAIL;
    case TORN: case SHORT: return HALF;
    default: return GO;
    }
}

/* One call on names: decided, done and recorded with the lock held, so that records stand in the order of the calls. */
#define NAMED(OP, GROWS, PATH, SECOND, CALL)                                                                           \
    do {                                                                                                               \
        pthread_mutex_lock(&lock);                                                                                     \
        enum answer answer = decide(PATH, GROWS);                                                                      \
        if (answer == HALF && fault == TORN) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }               \
        long result = answer == FAIL ? -1 : (long)(CALL);                                                              \
        int error = errno;                                                                                             \
        record(OP, result < 0 ? error : 0, PATH, SECOND, 0, "", 0);                                                    \
        pthread_mutex_unlock(&lock);                                                                                   \
        errno = error;                                                                                                 \
        return result;                                                                                                 \
    } while (0)

/* ------------------------------------------------------------------------------------------- opening */

static int opened(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    if (!armed || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE)
        return syscall(SYS_openat, folder, name, flags, mode);
    absolute(folder, name, path);
    if (!below(path)) return syscall(SYS_openat, folder, name, flags, mode);
    int is_new = syscall(SYS_faccessat, folder, name, F_OK) < 0;
    const char *op = is_new ? "create" : flags & O_TRUNC ? "empty" : "open";
    NAMED(op, is_new, path, "", syscall(SYS_openat, folder, name, flags, mode));
}

#define MODE(FLAGS) va_list rest; va_start(rest, FLAGS); \
    mode_t mode = (FLAGS) & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest)

int open(const char *name, int flags, ...) { MODE(flags); return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags); return opened(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int dir, const char *name, int flags, ...) { MODE(flags); return opened(dir, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE(flags); return opened(dir, name, flags, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* ------------------------------------------------------------------------------------------- writing */

static ssize_t written(int fd, const void *data, size_t length, off_t offset, int placed)
{
    char path[PATH_MAX];
    struct stat found;
    if (armed) of_descriptor(fd, path);
    if (!armed || !below(path))
        return placed ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
    pthread_mutex_lock(&lock);
    if (!placed && fcntl(fd, F_GETFL) & O_APPEND) offset = fstat(fd, &found) ? 0 : found.st_size;
    else if (!placed) offset = lseek(fd, 0, SEEK_CUR);
    enum answer answer = decide(path, 1);
    size_t now = answer == HALF ? (length + 1) / 2 : length;
    ssize_t result = answer == FAIL ? -1
        : placed ? syscall(SYS_pwrite64, fd, data, now, offset) : syscall(SYS_write, fd, data, now);
    int error = errno;
    if (answer == HALF && fault == TORN) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }
    record("write", result < 0 ? error : 0, path, "", offset, data, result < 0 ? 0 : result);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

ssize_t write(int fd, const void *data, size_t length) { return written(fd, data, length, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return written(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) { return written(fd, data, length, offset, 1); }

static int watched(int fd)
{
    char path[PATH_MAX];
    if (!armed) return 0;
    of_descriptor(fd, path);
    return below(path);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    if (!watched(fd)) return syscall(SYS_writev, fd, parts, count);
    for (int i = 0; i < count; i++)  /* fewer bytes than asked for are allowed: the caller writes the rest again */
        if (parts[i].iov_len) return written(fd, parts[i].iov_base, parts[i].iov_len, 0, 0);
    return 0;
}

/* Whoever is refused these copies with read and write, which are seen. */
#define REFUSED(FD, ...) do { if (watched(FD)) { errno = EINVAL; return -1; } return syscall(__VA_ARGS__); } while (0)
ssize_t sendfile(int to, int from, off_t *offset, size_t n) { REFUSED(to, SYS_sendfile, to, from, offset, n); }
ssize_t sendfile64(int to, int from, off_t *offset, size_t n) { REFUSED(to, SYS_sendfile, to, from, offset, n); }
ssize_t copy_file_range(int from, off_t *here, int to, off_t *there, size_t n, unsigned flags)
{
    REFUSED(to, SYS_copy_file_range, from, here, to, there, n, flags);
}

static int cut(int fd, off_t length)
{
    char path[PATH_MAX];
    if (armed) of_descriptor(fd, path);
    if (!armed || !below(path)) return syscall(SYS_ftruncate, fd, length);
    pthread_mutex_lock(&lock);
    enum answer answer = decide(path, 1);
    long result = answer == FAIL ? -1 : syscall(SYS_ftruncate, fd, length);
    int error = errno;
    record("truncate", result < 0 ? error : 0, path, "", length, "", 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int ftruncate(int fd, off_t length) { return cut(fd, length); }
int ftruncate64(int fd, off_t length) { return cut(fd, length); }

/* ------------------------------------------------------------------------------------------- syncing */

static int synced(int fd, int number, const char *op)
{
    char path[PATH_MAX];
    if (armed) of_descriptor(fd, path);
    if (!armed || !below(path)) return syscall(number, fd);
    NAMED(op, 1, path, "", syscall(number, fd));
}

int fsync(int fd) { return synced(fd, SYS_fsync, "sync"); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync, "sync"); }
int syncfs(int fd) { return synced(fd, SYS_syncfs, "syncall"); }

void sync(void)
{
    pthread_mutex_lock(&lock);
    syscall(SYS_sync);
    if (armed) calls += !*wanted, record("syncall", 0, root, "", 0, "", 0);
    pthread_mutex_unlock(&lock);
}

/* ------------------------------------------------------------------------------------------- names */

static int renamed(int from, const char *old, int to, const char *new, unsigned flags)
{
    char path[PATH_MAX], second[PATH_MAX];
    absolute(from, old, path), absolute(to, new, second);
    if (!below(path) && !below(second)) return syscall(SYS_renameat2, from, old, to, new, flags);
    NAMED("rename", 0, path, second, syscall(SYS_renameat2, from, old, to, new, flags));
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    return renamed(from, old, to, new, flags);
}

static int removed(int folder, const char *name, int flags)
{
    char path[PATH_MAX];
    absolute(folder, name, path);
    if (!below(path)) return syscall(SYS_unlinkat, folder, name, flags);
    NAMED(flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, path, "", syscall(SYS_unlinkat, folder, name, flags));
}

int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }

static int made(int folder, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    absolute(folder, name, path);
    size_t n = strlen(path);
    if (n > 1 && path[n - 1] == '/') path[n - 1] = 0;
    if (!below(path)) return syscall(SYS_mkdirat, folder, name, mode);
    NAMED("mkdir", 1, path, "", syscall(SYS_mkdirat, folder, name, mode));
}

int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return made(folder, name, mode); }

static int linked(int from, const char *old, int to, const char *new, int flags)
{
    char path[PATH_MAX], second[PATH_MAX];
    absolute(from, old, path), absolute(to, new, second);
    if (!below(second)) return syscall(SYS_linkat, from, old, to, new, flags);
    NAMED("link", 1, path, second, syscall(SYS_linkat, from, old, to, new, flags));
}

int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }
