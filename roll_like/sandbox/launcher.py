"""Starts bubblewrap as root inside a user namespace whose programs are not root outside.

    python -I -S launcher.py INSIDE_UID OUTSIDE_UID bwrap ARGUMENT…

An ordinary user needs none of this: bubblewrap maps that user's own id. As root it would map root's id, and to
the kernel the programs would be root's processes: the limit on processes does not hold for them. So two ids are
mapped, root's (bubblewrap mounts with it what only root can read) and an unused one that programs get.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWUSER = 0x10000000


def main(inside: int, outside: int, command: list[str]) -> None:
    """Become `command` in a user namespace with ids 0 → 0 and `inside` → `outside`."""
    libc = ctypes.CDLL(None, use_errno=True)
    ready_from, ready_to = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(ready_to)
        if os.read(ready_from, 1):
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{parent}/{name}", "w") as file:
                    file.write(f"0 0 1\n{inside} {outside} 1\n")
        os._exit(0)
    os.close(ready_from)
    os.setgroups([])
    if libc.unshare(_CLONE_NEWUSER):
        number = ctypes.get_errno()
        sys.exit(f"no user namespace: {os.strerror(number)}")
    os.write(ready_to, b"1")
    os.close(ready_to)
    if os.waitpid(helper, 0)[1]:
        sys.exit("the ids of the user namespace could not be mapped")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
