"""A filter for the kernel's calls, as the kernel reads it: what no honest program needs is refused, new processes above all.

A program is one process, with threads if it likes: that makes its memory limit exact and a fork bomb impossible. The filter is
a list of refusals on top of the namespaces; it keeps rarely used parts of the kernel out of reach.
"""

import errno
import platform
import struct

# call -> its number on (x86_64, aarch64); None: the machine does not have it
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
    "memfd_create": (319, 279),  # memory outside the process's own limit, as the next three
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

ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column above, the kernel's name for it

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in the kernel's struct seccomp_data


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The program for `bwrap --seccomp`, or None on a machine whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[machine]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":  # the other set of numbers on the same machine would pass the list by
        lines += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    # A C library that is told "no such call" uses clone, whose flags can be looked at.
    lines += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            lines += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    lines += [
        (JUMP_EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_BITS, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
