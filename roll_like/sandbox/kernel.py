"""System calls that Python has no function for. Only the standard library: this file is used inside boxes too.

Every function raises `OSError` with the call's name where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000

CAP_SYS_ADMIN = 21

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 4, 8, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_LANDLOCK = (444, 445, 446)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _prctl(option: int, *arguments: int) -> None:
    padded = [*arguments, *[0] * (4 - len(arguments))]
    _call("prctl", option, *(ctypes.c_ulong(value) for value in padded))


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; with `CLONE_NEWPID` the next child is the first process of the new one."""
    _call("unshare", flags)


def set_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace that `descriptor` refers to."""
    _call("setns", descriptor, kind)


def keep_mounts_private() -> None:
    """Keep mounts of this namespace from others."""
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount_tmpfs(target: str, size: int, *, executable: bool) -> None:
    """Mount an empty file system in memory of at most `size` bytes and 4,096 files."""
    flags = _MS_NOSUID | _MS_NODEV | (0 if executable else _MS_NOEXEC)
    _call("mount", b"tmpfs", target.encode(), b"tmpfs", flags, f"size={size},nr_inodes=4096,mode=1777".encode())


def mount_processes(target: str) -> None:
    """Mount a /proc that shows this process namespace and nothing of the machine (Linux 5.8)."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _call("mount", b"proc", target.encode(), b"proc", flags, b"subset=pid,hidepid=invisible")


def hide_from_siblings() -> None:
    """Keep processes of the same user from reading this process's memory, descriptors and links in /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def become(uid: int) -> None:
    """Change every user and group id for good, with the permitted capabilities kept."""
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_KEEPCAPS, 0)


def forget_bounding_set() -> None:
    """Empty the bounding and the ambient set of capabilities."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            if capability <= CAP_SYS_ADMIN:  # every kernel knows these; only beyond the last one is failure the end
                raise
            break
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def set_capabilities(mask: int) -> None:
    """Set effective and permitted capabilities to `mask`, inheritable ones to none."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _call("capset", header, struct.pack("6I", low, low, 0, high, high, 0))


def forbid_new_privileges() -> None:
    """Make set-user-id programs and file capabilities without effect for this process and all after it."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def load_filter(instructions: bytes) -> None:
    """Load a seccomp filter, an array of `struct sock_filter`, for good."""
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(held))
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 where the kernel has none."""
    try:
        return _call("syscall", _SYS_LANDLOCK[0], None, 0, 1)
    except OSError:
        return 0


def file_rules(readable: list[str], listable: list[str], version: int) -> int:
    """Return a descriptor of Landlock rules that forbid every access to files but what is named.

    From version 4 they forbid TCP too, and from version 6 signals and abstract sockets to others.

    Args:
        readable: Files and folders to read and execute.
        listable: Folders to list, with everything below.
        version: What `landlock_version` returned.
    """
    files = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    files |= 1 << 15 if version >= 5 else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", files, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _call("syscall", _SYS_LANDLOCK[0], attributes, len(attributes), 0)
    execute, read_file, read_folder = 1, 1 << 2, 1 << 3
    for path in [*readable, *listable]:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = read_folder if os.path.isdir(path) else 0
        allowed |= execute | read_file if path in readable else 0
        _call("syscall", _SYS_LANDLOCK[1], rules, 1, struct.pack("=Qi", allowed, parent), 0)
        os.close(parent)
    return rules


def enforce_file_rules(rules: int) -> None:
    """Put this process under Landlock rules for good."""
    _call("syscall", _SYS_LANDLOCK[2], rules, 0)


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a resource limit; a limit that is lower already stays."""
    ceiling = resource.getrlimit(kind)[1]
    values = [value if ceiling == resource.RLIM_INFINITY else min(value, ceiling) for value in (soft, hard or soft)]
    resource.setrlimit(kind, (values[0], values[1]))
