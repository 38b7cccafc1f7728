/* System calls that fail or do a part, below Python: for LD_PRELOAD. See failing_calls.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static struct {
    char place[PATH_MAX], call[16];
    int error, at, every;
    long most;
} rule;
static int num_seen;

/* Let a call on files whose path holds PLACE fail, or do at most MOST bytes, or write one wrong byte where MOST is
   negative: the one numbered AT, or each EVERY one. */
void set_failing(const char *place, const char *call, int error, long most, int at, int every) {
    rule.place[0] = 0;
    num_seen = 0;
    snprintf(rule.call, sizeof rule.call, "%s", call);
    rule.error = error, rule.most = most, rule.at = at, rule.every = every;
    snprintf(rule.place, sizeof rule.place, "%s", place);
}

int num_failing_seen(void) { return num_seen; }

__attribute__((constructor)) static void read_environment(void) {
    const char *text = getenv("FAILING_CALLS");
    char place[PATH_MAX], call[16];
    int error, at, every;
    long most;
    if (text && sscanf(text, "%4095s %15s %d %ld %d %d", place, call, &error, &most, &at, &every) == 6)
        set_failing(place, call, error, most, at, every);
}

/* A star in the place stands for anything. */
static int is_ours(const char *path) {
    const char *star = strchr(rule.place, '*');
    char first[PATH_MAX];
    if (!rule.place[0] || !path) return 0;
    if (!star) return strstr(path, rule.place) != NULL;
    snprintf(first, sizeof first, "%.*s", (int)(star - rule.place), rule.place);
    path = strstr(path, first);
    return path && strstr(path, star + 1);
}

static int hits(const char *call, const char *path) {
    if (!is_ours(path) || strcmp(call, rule.call)) return 0;
    int number = __sync_add_and_fetch(&num_seen, 1);
    return rule.every ? number % rule.every == 0 : number == rule.at;
}

static const char *path_of(int descriptor, char *room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, room, PATH_MAX - 1);
    room[length < 0 ? 0 : length] = 0;
    return room;
}

static const char *path_in(int directory, const char *name, char *room) {
    if (name[0] == '/' || directory == AT_FDCWD) return name;
    char place[PATH_MAX];
    snprintf(room, 2 * PATH_MAX, "%s/%s", path_of(directory, place), name);
    return room;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL return errno = rule.error, -1
#define ON_DESCRIPTOR(name, call, count, parameters, arguments, cut)                  \
    ssize_t name parameters {                                                         \
        REAL(name);                                                                   \
        char room[PATH_MAX];                                                          \
        int saved = errno;                                                            \
        if (rule.place[0] && hits(call, path_of(descriptor, room))) {                 \
            if (rule.error) FAIL;                                                     \
            cut;                                                                      \
        }                                                                             \
        errno = saved;                                                                \
        return real arguments;                                                        \
    }
static ssize_t write_wrong(int descriptor, const void *data, size_t count) {
    REAL(write);
    char *copy = aligned_alloc(4096, (count + 4096) / 4096 * 4096); /* as O_DIRECT has it */
    memcpy(copy, data, count);
    copy[count / 2] ^= 0x10;
    ssize_t done = real(descriptor, copy, count);
    free(copy);
    return done;
}

#define CUT if (count > (size_t)rule.most) count = rule.most
ON_DESCRIPTOR(write, "write", count, (int descriptor, const void *data, size_t count), (descriptor, data, count),
              if (rule.most < 0) return write_wrong(descriptor, data, count);
              CUT)
ON_DESCRIPTOR(pwrite64, "write", count, (int descriptor, const void *data, size_t count, off64_t at),
              (descriptor, data, count, at), CUT)
ON_DESCRIPTOR(read, "read", count, (int descriptor, void *data, size_t count), (descriptor, data, count), CUT)
ON_DESCRIPTOR(pread64, "read", count, (int descriptor, void *data, size_t count, off64_t at),
              (descriptor, data, count, at), CUT)
ON_DESCRIPTOR(writev, "write", count, (int descriptor, const struct iovec *parts, int count),
              (descriptor, parts, count), count = 1)

int fsync(int descriptor) {
    REAL(fsync);
    char room[PATH_MAX];
    const char *path = path_of(descriptor, room);
    if (hits("fsync", path)) FAIL;
    return is_ours(path) ? 0 : real(descriptor); /* no power fails here */
}

int close(int descriptor) {
    REAL(close);
    char room[PATH_MAX];
    int is_hit = rule.place[0] && hits("close", path_of(descriptor, room)), result = real(descriptor);
    if (is_hit) FAIL;
    return result;
}

int posix_fallocate64(int descriptor, off64_t start, off64_t length) {
    REAL(posix_fallocate64);
    char room[PATH_MAX];
    return hits("fallocate", path_of(descriptor, room)) ? rule.error : real(descriptor, start, length);
}

#define ON_PATH(name, call, failed, parameters, arguments, path) \
    failed name parameters {                                     \
        REAL(name);                                              \
        char room[2 * PATH_MAX];                                 \
        (void)room;                                              \
        if (hits(call, path)) return errno = rule.error, (failed)-1; \
        return real arguments;                                   \
    }
ON_PATH(mkdir, "mkdir", int, (const char *name, mode_t mode), (name, mode), name)
ON_PATH(unlink, "unlink", int, (const char *name), (name), name)
ON_PATH(unlinkat, "unlink", int, (int from, const char *name, int flags), (from, name, flags), path_in(from, name, room))
ON_PATH(rename, "rename", int, (const char *old, const char *name), (old, name), name)
ON_PATH(renameat, "rename", int, (int from, const char *old, int to, const char *name), (from, old, to, name),
        path_in(to, name, room))
ON_PATH(link, "link", int, (const char *old, const char *name), (old, name), name)
ON_PATH(linkat, "link", int, (int from, const char *old, int to, const char *name, int flags),
        (from, old, to, name, flags), path_in(to, name, room))
ON_PATH(stat64, "stat", int, (const char *name, struct stat64 *found), (name, found), name)
ON_PATH(lstat64, "stat", int, (const char *name, struct stat64 *found), (name, found), name)
ON_PATH(fstatat64, "stat", int, (int from, const char *name, struct stat64 *found, int flags),
        (from, name, found, flags), path_in(from, name, room))

DIR *opendir(const char *name) {
    REAL(opendir);
    if (hits("list", name)) return errno = rule.error, NULL;
    return real(name);
}

#define OPENS(name, parameters, arguments, path)                      \
    int name parameters {                                             \
        REAL(name);                                                   \
        char room[2 * PATH_MAX];                                      \
        (void)room;                                                   \
        va_list more;                                                 \
        va_start(more, flags);                                        \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                 \
        if (hits("open", path)) FAIL;                                 \
        return real arguments;                                        \
    }
OPENS(open, (const char *name, int flags, ...), (name, flags, mode), name)
OPENS(open64, (const char *name, int flags, ...), (name, flags, mode), name)
OPENS(openat, (int from, const char *name, int flags, ...), (from, name, flags, mode), path_in(from, name, room))
OPENS(openat64, (int from, const char *name, int flags, ...), (from, name, flags, mode), path_in(from, name, room))
