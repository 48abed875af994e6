"""Which system calls a program in a box may make.

The filter is an allow list: what is on it works, what is known to be dangerous answers EPERM, and everything
else answers ENOSYS, as on a kernel that does not have it, so that libraries fall back to older calls. It is
compiled here with libseccomp and loaded inside the box by a process that needs no library for it.
"""

from __future__ import annotations

import errno
import tempfile
from functools import cache
from typing import Literal

from roll_like.sandbox.box import SandboxUnavailable

Profile = Literal["namespaces", "landlock"]


def _words(text: str) -> list[str]:
    return text.split()


_CALLS = _words("""
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek _llseek
open openat openat2 creat close close_range access faccessat faccessat2 dup dup2 dup3 flock
stat fstat lstat newfstatat fstatat64 stat64 fstat64 lstat64 statx statfs fstatfs statfs64 fstatfs64
getdents getdents64 getcwd readlink readlinkat umask
fsync fdatasync sync_file_range fadvise64 readahead copy_file_range sendfile sendfile64 pipe pipe2
getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
poll ppoll select _newselect pselect6 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait epoll_wait_old
epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
brk munmap mremap mprotect madvise msync mincore mlock munlock pkey_alloc pkey_free pkey_mprotect membarrier
rt_sigaction rt_sigprocmask rt_sigreturn sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause
alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
getpid getppid gettid getpgid getpgrp getsid setpgid setsid getuid geteuid getgid getegid getgroups getresuid
getresgid setuid setgid setreuid setregid setresuid setresgid capget getrlimit setrlimit ugetrlimit getrusage getcpu
uname sysinfo getrandom getpriority setpriority sched_yield sched_getaffinity sched_setaffinity
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min sched_getattr
futex futex_waitv set_robust_list get_robust_list set_tid_address rseq restart_syscall arch_prctl prctl
exit exit_group wait4 waitid waitpid fork vfork execve execveat
""")

#: Not all of these are among Landlock's rights, and nothing is writable there; its library is the current folder.
_FILE_CHANGES = _words("""
chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat link linkat symlink symlinkat
truncate ftruncate truncate64 ftruncate64 fallocate
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat
""")

#: Meaningful only where a process namespace confines them.
_IN_NAMESPACES = _words("kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo sendto recvfrom getsockopt shutdown")
_PROCESSES = _words("fork vfork execve execveat setpriority sched_setaffinity")

#: Refused with EPERM; everything that is on no list is refused with ENOSYS.
_DENIED = _words("""
unshare setns mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsmount fsconfig fspick mount_setattr
socket connect bind listen accept accept4 sendmsg sendmmsg recvmsg recvmmsg setsockopt
memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd pidfd_send_signal kcmp
keyctl add_key request_key bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
io_setup io_submit io_destroy kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff
open_by_handle_at name_to_handle_at mknod mknodat quotactl acct syslog sethostname setdomainname settimeofday
clock_settime clock_adjtime adjtimex personality seccomp capset setgroups iopl ioperm modify_ldt vhangup nfsservctl
splice tee vmsplice fanotify_init fanotify_mark inotify_init inotify_init1 inotify_add_watch lookup_dcookie
setxattr lsetxattr fsetxattr mlockall mlock2 migrate_pages move_pages mbind set_mempolicy sched_setscheduler
sched_setparam sched_setattr ioprio_set landlock_create_ruleset
""")

#: Every CLONE_NEW… flag, CLONE_PTRACE, CLONE_UNTRACED and CLONE_PARENT.
_CLONE_FORBIDDEN = 0x7E020000 | 0x2000 | 0x00800000 | 0x8000
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
#: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
#: F_DUPFD to F_SETLKW, locks of open files, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN (it sends signals),
#: F_SETPIPE_SZ or leases.
_FCNTLS = (*range(8), 36, 37, 38, 1030, 1032)
_AF_UNIX = 1


@cache
def filter_program(profile: Profile = "namespaces") -> bytes:
    """Return the filter as an array of `struct sock_filter`, for this machine's architecture.

    Args:
        profile: "namespaces" for a box with namespaces of its own. "landlock" for one without: no second
            thread or process, no signals and no pairs of sockets, because nothing else would confine them.

    Raises:
        SandboxUnavailable: libseccomp is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxUnavailable(
            f"libseccomp cannot be loaded: {error}", fix="apt-get install libseccomp2 && pip install pyseccomp"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    everywhere, masked = pyseccomp.ALLOW, pyseccomp.MASKED_EQ

    def add(action: int, name: str, *conditions: object) -> None:
        if pyseccomp.resolve_syscall(pyseccomp.system_arch(), name) != -1:  # -1: libseccomp is older than the call
            rules.add_rule(action, name, *conditions)

    namespaces = profile == "namespaces"
    inside = [*_IN_NAMESPACES, *_FILE_CHANGES]
    allowed = [*_CALLS, *inside] if namespaces else [name for name in _CALLS if name not in _PROCESSES]
    for name in allowed:
        add(everywhere, name)
    refused = _DENIED if namespaces else [*_DENIED, *inside, *_PROCESSES, "clone", "socketpair"]
    for name in refused:
        add(pyseccomp.ERRNO(errno.EPERM), name)
    if namespaces:
        add(everywhere, "clone", pyseccomp.Arg(0, masked, _CLONE_FORBIDDEN, 0))
        add(everywhere, "socketpair", pyseccomp.Arg(0, pyseccomp.EQ, _AF_UNIX))  # event loops wake themselves so
    # Anonymous shared memory outlives the process that touched it and is in no process's resident size.
    for name in ("mmap", "mmap2"):
        add(everywhere, name, pyseccomp.Arg(3, masked, _MAP_SHARED, 0))
        add(everywhere, name, pyseccomp.Arg(3, masked, _MAP_SHARED | _MAP_ANONYMOUS, _MAP_SHARED))
    for name in ("fcntl", "fcntl64"):
        for command in _FCNTLS:
            add(everywhere, name, pyseccomp.Arg(1, masked, 0xFFFFFFFF, command))
    for request in _IOCTLS:
        add(everywhere, "ioctl", pyseccomp.Arg(1, masked, 0xFFFFFFFF, request))
    add(everywhere, "prlimit64", pyseccomp.Arg(0, pyseccomp.EQ, 0))  # its own limits only
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
