"""System calls that no candidate's program needs, refused by every sandbox that is made here.

Three kinds: calls refused whatever their arguments; calls on processes, refused for any process but the caller; and
sockets, of which only those of this machine's files (AF_UNIX) are left: Landlock rules TCP alone, neither multipath
TCP nor what is sent while a connection is opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from functools import cache

from services.reward.code.sandboxes.sandbox import SandboxError

AF_UNIX = 1
CLONE_NEW = 0x7E020000 | 0x00000080
"""Flags of `clone` for namespaces of every kind."""
_NUMBERS = {
    "x86_64": {
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "fanotify_init": 300, "kcmp": 312},
        **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "lookup_dcookie": 212},
        **{"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429},
        **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442},
        **{"name_to_handle_at": 303, "open_by_handle_at": 304, "pidfd_getfd": 438, "perf_event_open": 298},
        **{"process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "ptrace": 101, "setns": 308},
        **{"unshare": 272, "userfaultfd": 323, "vmsplice": 278, "setpriority": 141, "ioprio_set": 251},
        **{"migrate_pages": 256, "move_pages": 279, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240},
        **{"prlimit64": 302, "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142},
        **{"sched_setattr": 314, "socket": 41, "clone": 56, "clone3": 435, "seccomp": 317},
    },
    "aarch64": {
        **{"add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "fanotify_init": 262, "kcmp": 272},
        **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "lookup_dcookie": 18},
        **{"mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "open_tree": 428, "move_mount": 429},
        **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442},
        **{"name_to_handle_at": 264, "open_by_handle_at": 265, "pidfd_getfd": 438, "perf_event_open": 241},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "process_madvise": 440, "ptrace": 117, "setns": 268},
        **{"unshare": 97, "userfaultfd": 282, "vmsplice": 75, "setpriority": 140, "ioprio_set": 30},
        **{"migrate_pages": 238, "move_pages": 239, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180},
        **{"prlimit64": 261, "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118},
        **{"sched_setattr": 274, "socket": 198, "clone": 220, "clone3": 435, "seccomp": 277},
    },
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
ON_PROCESSES = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Calls whose first argument is a process: 0 is the caller."""
REFUSED = tuple(
    name for name in _NUMBERS["x86_64"] if name not in {*ON_PROCESSES, "socket", "clone", "clone3", "seccomp"}
)
"""Calls refused whatever their arguments."""

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST = 0, 4, 16
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _SET_FILTER, _TSYNC = 38, 24, 1, 1
_CAPABILITIES = 64
"""More than there are."""

Instruction = tuple[int, int, int, int]
"""Operation, how many instructions to skip if it is true and if it is false, and its operand."""


def whole_filter() -> bytes:
    """A BPF program (`struct sock_filter[]`) that refuses all of them. Raises SandboxError on other machines."""
    numbers = _numbers()
    refused = [_refuse_if(numbers[name]) for name in REFUSED]
    others = [_refuse_if_first(numbers[name], _JUMP_EQ, 0, is_refused=False) for name in ON_PROCESSES]
    sockets = _refuse_if_first(numbers["socket"], _JUMP_EQ, AF_UNIX, is_refused=False)
    spaces = _refuse_if_first(numbers["clone"], _JUMP_ANY_BIT, CLONE_NEW, is_refused=True)
    # Its flags cannot be seen here; libraries then take `clone`.
    clone3 = _refuse_if(numbers["clone3"], errno.ENOSYS)
    return _program(*refused, *others, sockets, spaces, clone3)


def filter_by_arguments() -> bytes:
    """A BPF program that refuses what is done to other processes, and sockets. Raises SandboxError elsewhere."""
    numbers = _numbers()
    others = [_refuse_if_first(numbers[name], _JUMP_EQ, 0, is_refused=False) for name in ON_PROCESSES]
    return _program(*others, _refuse_if_first(numbers["socket"], _JUMP_EQ, AF_UNIX, is_refused=False))


@cache
def refuse_by_arguments() -> None:
    """Apply `filter_by_arguments` to all threads of this process, and so to its children, for good.

    What its children execute has no capabilities either, which neither Landlock nor a filter bounds: as root a program
    could set the clock, raise its limits and take all of a core. For a process that does nothing but start programs.
    Raises SandboxError.
    """
    content = filter_by_arguments()
    instructions = ctypes.create_string_buffer(content, len(content))
    # struct sock_fprog
    filled = struct.pack("HxxxxxxP", len(content) // 8, ctypes.addressof(instructions))
    program = ctypes.create_string_buffer(filled, len(filled))
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(_CAPABILITIES):
        # Fails for another user than root, who has none to give.
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.syscall(
        _numbers()["seccomp"], _SET_FILTER, _TSYNC, program
    ):
        raise SandboxError(f"seccomp: {os.strerror(ctypes.get_errno())}")


def _numbers() -> dict[str, int]:
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise SandboxError(f"seccomp: {machine}: system calls are known for {' and '.join(_NUMBERS)}; use a container")
    return _NUMBERS[machine]


def _refuse_if(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return [(_JUMP_EQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]


def _refuse_if_first(number: int, jump: int, operand: int, *, is_refused: bool) -> list[Instruction]:
    """Look at the lower half of a call's first argument, all of what these calls read; then at the number again."""
    true, false = (0, 1) if is_refused else (1, 0)
    return [
        (_JUMP_EQ, 0, 4, number),
        (_LOAD, 0, 0, _OFFSET_FIRST),
        (jump, true, false, operand),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]


def _program(*rules: list[Instruction]) -> bytes:
    machine = platform.machine()
    begin: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        begin += [(_JUMP_GE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    instructions = [*begin, *(each for rule in rules for each in rule), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in instructions)
