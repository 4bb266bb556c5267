"""A seccomp filter: refuses system calls that no honest program needs, above all new processes.

A program is one process, with threads. So its memory limit is exact, and a fork bomb is impossible.
The filter is a list of refusals on top of the namespaces; it keeps rarely used parts of the kernel
out of reach.
"""

import errno
import platform
import struct

# system call -> its number on (x86_64, aarch64); None: the machine does not have it
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # These four allocate memory that the process's own limit does not count.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
CLONE_THREAD = 0x10000

# machine -> (column in the tables above, the kernel's AUDIT_ARCH number)
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}
X32_BIT = 0x40000000  # system calls of the x32 ABI have numbers from here on

# BPF instructions: (code, jump if true, jump if false, operand).
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
JUMP_BITS = 0x45
RETURN = 0x06
# What a filter can return.
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
# Offsets in the kernel's struct seccomp_data.
NUMBER_AT = 0
ARCHITECTURE_AT = 4
FIRST_ARGUMENT_AT = 16


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the BPF program for `bwrap --seccomp`, or None on other processors than these two."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[machine]
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":  # the x32 numbers of the same calls would bypass the list
        instructions += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    # After ENOSYS for clone3 the C library uses clone, whose flags a filter can read.
    instructions += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            instructions += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    instructions += [
        (JUMP_EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_BITS, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)
