"""Runs a Python program that nobody has read. builtin.py starts this file by its path:

    python -I sandbox.py PARENT DESCRIPTOR SECONDS BYTES

The program comes through the descriptor, as JSON [program, word]. If the program runs to its last line, this process
then writes the word to standard error. The process ends when the process with the number PARENT ends, which started it.
The program's processor time, memory and output are limited. A filter of system calls (seccomp) refuses to open a file
for writing, to change one, to open a socket, and to start or signal a process. The program may read files. Nothing can
take the filter back.

The system calls are those of x86-64 and aarch64, with their numbers in Linux.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys

OUTPUT_BYTES = 1 << 20

# machine -> (number in seccomp's data, call -> number)
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            **{"open": 2, "openat": 257, "clone": 56},
            **{"shmget": 29, "socket": 41, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "semget": 64},
            **{"msgget": 68, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86},
            **{"unlink": 87, "symlink": 88, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94},
            **{"ptrace": 101, "utime": 132, "mknod": 133, "setpriority": 141, "pivot_root": 155, "prctl": 157},
            **{"chroot": 161},
            **{"mount": 165, "umount2": 166, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197},
            **{"lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "tgkill": 234},
            **{"utimes": 235, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "mkdirat": 258},
            **{"mknodat": 259, "fchownat": 260, "futimesat": 261, "unlinkat": 263, "renameat": 264, "linkat": 265},
            **{"symlinkat": 266, "fchmodat": 268, "unshare": 272, "utimensat": 280, "perf_event_open": 298},
            **{"prlimit64": 302, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310},
            **{"process_vm_writev": 311, "renameat2": 316, "bpf": 321, "execveat": 322, "userfaultfd": 323},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"openat": 56, "clone": 220},
            **{"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15},
            **{"fremovexattr": 16, "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37},
            **{"renameat": 38, "umount2": 39, "mount": 40, "pivot_root": 41, "truncate": 45, "chroot": 51},
            **{"fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "unshare": 97},
            **{"ptrace": 117, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131, "setpriority": 140},
            **{"prctl": 167},
            **{"mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "add_key": 217},
            **{"request_key": 218, "keyctl": 219, "execve": 221, "perf_event_open": 241, "prlimit64": 261},
            **{"open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271},
            **{"renameat2": 276, "bpf": 280, "execveat": 281, "userfaultfd": 282},
        },
    ),
}
_COMMON = {"pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "openat2": 437, "fchmodat2": 452}
_CLONE3 = 435  # libc falls back to clone, whose flags the filter can see
_CLONE_THREAD = 0x10000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# classic BPF, see linux/filter.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2


def supported() -> bool:
    """Return whether the filter knows this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def close_in() -> None:
    """Set the filter of system calls.

    Raises:
        OSError: the kernel refuses it, or it does not hold.
    """
    architecture, calls = _MACHINES[platform.machine()]
    calls, denied = {**calls, **_COMMON}, _ERROR | errno.EACCES
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32 calls have numbers of their own
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for name, flags in ("open", 1), ("openat", 2):  # `flags`: which argument
        if name in calls:
            number = calls.pop(name)
            steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * flags), (_ANY_BIT, 0, 1, _WRITES)]
            steps += [(_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 4, calls.pop("clone")), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD)]
    steps += [(_RETURN, 0, 0, denied), (_RETURN, 0, 0, _ALLOW)]
    for number in calls.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, ctypes.addressof(header), 0, 0):
        if libc.prctl(call[0], *map(ctypes.c_ulong, call[1:])):
            raise OSError(ctypes.get_errno(), "seccomp")
    for forbidden in (lambda: socket.socket().close(), lambda: os.close(os.open("/dev/null", os.O_WRONLY))):
        try:
            forbidden()
        except PermissionError:
            continue
        raise OSError(0, "the filter of system calls does not hold")


def main() -> None:
    parent, descriptor, seconds, memory = map(int, sys.argv[1:])
    # as parent.die_with does, which an isolated interpreter may be unable to import
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
    with os.fdopen(descriptor) as content:
        program, word = json.load(content)
    for limit, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    close_in()
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    print(word, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
