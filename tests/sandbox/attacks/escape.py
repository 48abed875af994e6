"""Programs that try to leave the sandbox, to use the network, or to leave something for the next one."""

from __future__ import annotations

from attacks.case import OPEN, RAISED, WRONG, WRONG_OR_RAISED, Attack

KINDS = ("stdio", "call")

_TRY = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if value < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value
def solve(x):
    try:
        return "OPEN" if attempt() else "closed"
    except (OSError, ValueError, AttributeError, ImportError) as error:
        return "closed: " + repr(error)[:100]
"""

#: `{canary}` and `{port}` are filled in: a file and a listening port of the host.
_ESCAPES = {
    "a file of the host": """
def attempt(): return open({canary!r}).read()
""",
    "a file of the host written": """
def attempt(): return open({canary!r}, 'w').write('broken')
""",
    "a file of the host through /proc": """
def attempt(): return open('/proc/1/root' + {canary!r}).read()
""",
    "a file of the host through a working directory": """
def attempt(): return open('/proc/1/cwd/' + {canary!r}).read()
""",
    "a link to a file of the host": """
def attempt():
    os.symlink({canary!r}, '/tmp/link')
    return open('/tmp/link').read()
""",
    "a way up from an open folder": """
def attempt():
    number = os.open('/', os.O_RDONLY)
    os.fchdir(number)
    for _ in range(50): os.chdir('..')
    return os.path.exists({canary!r}.lstrip('/'))
""",
    "a mount": """
def attempt(): return libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0
""",
    "the root mounted again for writing": """
def attempt(): return libc.mount(None, b'/', None, 32 | 4096, None) == 0
""",
    "an unmount": """
def attempt(): return any(libc.umount2(p, 2) == 0 for p in (b'/proc', b'/tmp', b'/dev', b'/usr'))
""",
    "a new user namespace": """
def attempt(): return libc.unshare(0x10000000) == 0
""",
    "new namespaces of every kind": """
def attempt(): return any(libc.unshare(1 << n) == 0 for n in (7, 17, 25, 26, 27, 29, 30))
""",
    "clone with namespaces": """
def attempt(): return syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0
""",
    "clone3": """
def attempt():
    data = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
    return syscall(435, data, 88) >= 0
""",
    "the namespaces of process 1": """
def attempt(): return any(libc.setns(os.open(f'/proc/1/ns/{{k}}', 0), 0) == 0 for k in ('mnt', 'user', 'net'))
""",
    "another root": """
def attempt(): os.chroot('/tmp'); return True
""",
    "pivot_root": """
def attempt(): return syscall(155, b'/tmp', b'/tmp') == 0
""",
    "user 0": """
def attempt(): os.setuid(0); return os.getuid() == 0
""",
    "user 0 by setresuid and groups": """
def attempt():
    os.setgroups([0])
    os.setresuid(0, 0, 0)
    return True
""",
    "any capability": """
def attempt():
    text = open('/proc/self/status').read()
    return any(int(line.split()[1], 16) for line in text.splitlines() if line.startswith('Cap'))
""",
    "privileges by a program of root": """
def attempt():
    return 'NoNewPrivs:\\t1' not in open('/proc/self/status').read()
""",
    "user 0 at the start": """
def attempt(): return os.getuid() == 0 or os.geteuid() == 0 or os.getgid() == 0
""",
    "ptrace of the parent": """
def attempt(): return libc.ptrace(16, os.getppid(), 0, 0) == 0
""",
    "ptrace of a child": """
def attempt():
    pid = os.fork()
    if pid == 0: signal.pause()
    return libc.ptrace(16, pid, 0, 0) == 0
""",
    "memory of process 1": """
def attempt(): return open('/proc/1/mem', 'r+b', 0)
""",
    "signals to everybody": """
def attempt():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(-1, signal.SIGTERM)
    return False
""",
    "signals to its group": """
def attempt():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(0, signal.SIGTERM)
    return False
""",
    "signals to its parents": """
def attempt():
    for pid in (1, os.getppid()):
        for n in (9, 15, 19, 11):
            try: os.kill(pid, n)
            except OSError: pass
    import time
    time.sleep(0.2)
    return False
""",
    "a device made": """
def attempt(): os.mknod('/tmp/null', 0o600 | 0o20000, os.makedev(1, 1)); return True
""",
    "disks and memory": """
def attempt():
    for name in ('/dev/sda', '/dev/vda', '/dev/mem', '/dev/kmsg', '/dev/kvm', '/dev/fuse', '/dev/nvidia0'):
        try: return os.open(name, os.O_RDONLY) >= 0
        except OSError: pass
""",
    "a terminal's input": """
import fcntl
def attempt():
    for n in range(3):
        try:
            fcntl.ioctl(n, 0x5412, b'x')
            return True
        except OSError: pass
""",
    "settings of the kernel": """
def attempt():
    for name in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/swappiness', '/sys/power/state'):
        try: open(name, 'w').close(); return True
        except OSError: pass
""",
    "its own oom score": """
def attempt():
    open('/proc/self/oom_score_adj', 'w').write('-1000')
    return True
""",
    "a core file": """
import resource
def attempt():
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
    return True
""",
    "limits raised": """
import resource
def attempt():
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); return True
        except (OSError, ValueError): pass
""",
    "limits of its parent": """
import resource
def attempt(): return bool(resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1)))
""",
    "a handle of a file": """
def attempt():
    handle = (ctypes.c_char * 128)()
    handle[0] = 8
    number = os.open('/', 0)
    return libc.open_by_handle_at(number, handle, 0) >= 0
""",
    "kernel keys": """
def attempt(): return syscall(250, 0, -3, 0) >= 0
""",
    "BPF": """
def attempt(): return syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0
""",
    "performance counters": """
def attempt(): return syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0
""",
    "page faults": """
def attempt(): return syscall(323, 0) >= 0
""",
    "io_uring": """
def attempt(): return syscall(425, 4, ctypes.create_string_buffer(256)) >= 0
""",
    "kernel modules": """
def attempt(): return syscall(313, 0, b'', 0) == 0
""",
    "another personality": """
def attempt(): return libc.personality(0x0040000) not in (-1,)
""",
    "files of the interpreter": """
def attempt():
    for name in (os.__file__, sys.executable, ctypes.__file__, '/box/roll_like/sandbox/codec.py'):
        try: open(name, 'a').close(); return True
        except OSError: pass
""",
    "a program for the owner": """
def attempt():
    for top in ('/', '/usr', '/etc', '/box', '/dev', '/proc', '/home'):
        try: open(top + '/left', 'w').close(); return True
        except OSError: pass
""",
    "a program run with another user's rights": """
def attempt():
    open('/tmp/x', 'w').write('#!/bin/sh\\n')
    os.chmod('/tmp/x', 0o4755)
    os.chown('/tmp/x', 0, 0)
    return True
""",
    "the zygote's control socket": """
def attempt():
    for n in range(5, 64):
        try: os.write(n, b'{{"status": 0}}'); return True
        except OSError: pass
""",
    "32-bit system calls": """
import mmap
def attempt():
    return os.uname().machine not in ('x86_64', 'aarch64') or b32()
def b32():
    area = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    area.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
    value = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))()
    return value > 0
""",
}

_NETWORK = {
    "a connection to the host": """
import socket
def attempt():
    return socket.create_connection(('127.0.0.1', {port}), 1)
""",
    "a connection outside": """
import socket
def attempt():
    return socket.create_connection(('1.1.1.1', 53), 1)
""",
    "a name looked up": """
import socket
def attempt(): return socket.gethostbyname('localhost.example')
""",
    "a UDP packet": """
import socket
def attempt():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))
""",
    "an abstract socket": """
import socket
def attempt():
    s = socket.socket(socket.AF_UNIX)
    s.bind(chr(0) + 'roll-like-attack')
    return True
""",
    "a socket in a folder": """
import socket
def attempt():
    s = socket.socket(socket.AF_UNIX)
    s.bind('/tmp/s')
    return True
""",
    "a server": """
import socket
def attempt():
    s = socket.socket()
    s.bind(('0.0.0.0', 0))
    s.listen()
    return True
""",
    "netlink": """
import socket
def attempt(): return socket.socket(16, socket.SOCK_RAW, 0)
""",
    "raw packets": """
import socket
def attempt(): return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)
""",
    "a virtual machine's socket": """
import socket
def attempt(): return socket.socket(40, socket.SOCK_STREAM)
""",
    "a web request": """
import urllib.request
def attempt(): return urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1).read()
""",
    "interfaces of the host": """
def attempt():
    lines = open('/proc/net/dev').read().splitlines()[2:]
    return any(not line.strip().startswith('lo:') for line in lines)
""",
}


#: Pairs: what the first program leaves, and how the next one would see it.
_PERSISTENCE = {
    "a file in /tmp": ("open('/tmp/left', 'w').write('x')", "os.path.exists('/tmp/left')"),
    "a file in /dev/shm": ("open('/dev/shm/left', 'w').write('x')", "os.path.exists('/dev/shm/left')"),
    "a file in the working directory": ("open('left', 'w').write('x')", "os.path.exists('left')"),
    "an environment variable": ("os.environ['LEFT'] = 'x'; os.putenv('LEFT', 'x')", "'LEFT' in os.environ"),
    "a changed module": (
        "import json; json.left = True; sys.modules['left'] = json",
        "'left' in sys.modules or hasattr(__import__('json'), 'left')",
    ),
    "a changed builtin": ("import builtins; builtins.left = True", "hasattr(__import__('builtins'), 'left')"),
    "sitecustomize": (
        "[open(p + '/sitecustomize.py', 'w').write('import builtins; builtins.left = 1')"
        " for p in ['/tmp', *sys.path] if os.access(p, os.W_OK)]",
        "hasattr(__import__('builtins'), 'left') or 'sitecustomize' in sys.modules",
    ),
    "a process": (
        "os.fork() or (os.setsid(), os.fork() or __import__('time').sleep(1000))",
        "len([p for p in os.listdir('/proc') if p.isdigit()]) > 3",
    ),
    "a working directory": ("os.mkdir('/tmp/d'); os.chdir('/tmp/d')", "os.getcwd() == '/tmp/d'"),
    "a signal handler": (
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "__import__('signal').getsignal(__import__('signal').SIGUSR1) != __import__('signal').SIG_DFL",
    ),
    "shared memory with a key": (
        "import ctypes; ctypes.CDLL(None).shmget(4242, 4096, 0o1666)",
        "__import__('ctypes').CDLL(None).shmget(4242, 4096, 0o666) >= 0",
    ),
    "niceness": ("os.nice(10)", "os.nice(0) >= 10"),
    "a changed file of the sandbox": (
        "open(json_file(), 'a').write('#left')",
        "'#left' in open(json_file()).read()",
    ),
}
_JSON_FILE = "import os, sys\ndef json_file():\n    import json\n    return json.__file__\n"


def escapes(canary: str, port: int) -> list[Attack]:
    """The attacks on a file and a port of the host."""
    broken = {"signals to its parents", "signals to everybody", "signals to its group"}
    return [
        Attack(
            name=name,
            program=_TRY + body.format(canary=canary, port=port),
            statuses=WRONG_OR_RAISED if name in broken or name == "32-bit system calls" else WRONG,
            kinds=KINDS,
            expected=OPEN,
        )
        for name, body in _ESCAPES.items()
    ]


def network(canary: str, port: int) -> list[Attack]:
    """The attacks on a port of the host, and on what lies beyond."""
    return [
        Attack(
            name=name, program=_TRY + body.format(canary=canary, port=port), statuses=WRONG, kinds=KINDS, expected=OPEN
        )
        for name, body in _NETWORK.items()
    ]


PERSISTENCE = [
    Attack(
        name=name,
        before=_JSON_FILE + f"try:\n    {leave}\nexcept (OSError, RuntimeError): pass\ndef solve(x): return x\n",
        program=_JSON_FILE + f"def solve(x): return 'OPEN' if {condition} else 'nothing'",
        statuses=WRONG | (RAISED if name == "niceness" else frozenset()),
        kinds=KINDS,
        expected=OPEN,
    )
    for name, (leave, condition) in _PERSISTENCE.items()
]
