"""The confined side of a sandboxed program: a script that `sandbox` runs, with Python's own modules only.

    python -I confine.py TASK RESULT

TASK is the descriptor of a file with the task in JSON, RESULT that of a pipe. The process limits itself irrevocably,
reports that in RESULT and runs the program. Each of the program's tests that passes adds a line to RESULT.

The kernel enforces the confinement, for ordinary users and root:

- resource limits: memory, seconds of a core, size of a file, open files;
- no capabilities, so that root is like any user who owns root's files;
- a seccomp filter: no other process and no other program, no socket, no signal to others, no memory that the limit does
  not count, no folders, nothing that changes owners, modes or times of files;
- Landlock: files can be created, written and removed in the working directory only; readable are that directory,
  Python, the system's libraries and the process's own entry in /proc.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import traceback
import types

# (x86_64, aarch64) numbers of system calls; None: the machine has none of that name. Calls that need a capability, to
# mount, load modules or set clocks, are not here: the process has none, and cannot get one by unshare, setns or execve.
REFUSED = {  # with EPERM
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "execve": (59, 221),
    "execveat": (322, 281),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
}
BEGINS_A_PROCESS = {"fork": (57, None), "vfork": (58, None)}  # with EAGAIN, as where there are too many
NEEDS_OTHER_CALLS = {"clone3": (435, 435), "openat2": (437, 437)}  # with ENOSYS: libraries then use clone and openat
CLONE = (56, 220)
KILL = (62, 129)
TGKILL = (234, 131)
PRLIMIT = (302, 261)
PRCTL = (157, 167)
FCNTL = (72, 25)
LINKS = {"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)}  # with EPERM
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # place in the pairs above, and the kernel's number
CLONE_THREAD = 0x10000
F_SETOWN = 8
F_SETOWN_EX = 15
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
# Rights that a version of Landlock knows: to execute, write, read, remove and make; to move; to truncate.
LANDLOCK_RIGHTS = ((1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1)
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_FOLDER = 1 << 3
TRUNCATE = 1 << 14
READ_RIGHTS = READ_FILE | READ_FOLDER
FILES_ONLY = (
    READ_RIGHTS | WRITE_FILE | 1 << 5 | 1 << 8 | TRUNCATE
)  # and remove and make them, but no folders, links, devices
DEVICE_FILES = (os.devnull, "/dev/zero", "/dev/urandom", "/dev/random")

libc = ctypes.CDLL(None, use_errno=True)


def confine(directory: str, limits: dict, readable: list, parent: int) -> None:
    """Confine this process irrevocably.

    Args:
      directory: where files may be written.
      limits: memory_bytes, cpu_s, file_bytes, open_files.
      readable: files and folders that may be read.
      parent: id of the process with which this one ends.

    Raises:
      OSError: the kernel refuses a restriction.
    """
    cpu_s = max(1, round(limits["cpu_s"]))
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most + 1 if what == resource.RLIMIT_CPU and hard != most else most))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which a scheduler may send to every process of a run
        signal.signal(sign, signal.SIG_IGN)
    _restrict_files(directory, readable)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    _checked(libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)))
    os.stat(json.__file__)  # which only root with its capabilities may read where Python is another user's
    _prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    program = b"".join(struct.pack("<HBBI", *line) for line in filter_lines(platform.machine(), os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(pointer, len(pointer)))


def filter_lines(machine: str, pid: int) -> list:
    """The seccomp filter as BPF instructions: (code, jump if true, jump if false, operand).

    Args:
      machine: one of `MACHINES`.
      pid: id of the process.
    """
    column, kernel = MACHINES[machine]
    load = 0x20
    equal = 0x15
    some = 0x45
    give = 0x06
    allow = 0x7FFF0000
    kill = 0x80000000

    def refuse(calls: dict, error: int) -> list:
        numbers = [pair[column] for pair in calls.values() if pair[column] is not None]
        return [line for n in numbers for line in ((equal, 0, 1, n), (give, 0, 0, 0x50000 | error))]

    def check(call: tuple, argument: int, test: int, values: tuple, error: int, ok: bool) -> list:
        """Refuse a call, or allow it if `ok`, when an argument matches one of the values; else the opposite."""
        if call[column] is None:
            return []
        results = (allow, 0x50000 | error) if ok else (0x50000 | error, allow)
        tests = [(test, len(values) - i, 0, value) for i, value in enumerate(values)]
        inside = [(load, 0, 0, 16 + 8 * argument), *tests, (give, 0, 0, results[1]), (give, 0, 0, results[0])]
        return [(equal, 0, len(inside), call[column]), *inside]

    return [
        (load, 0, 0, 4),
        (equal, 1, 0, kernel),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (0x35, 0, 1, 0x40000000),
        (give, 0, 0, kill),  # numbers of another interface of the same machine
        *refuse(REFUSED, errno.EPERM),
        *refuse(LINKS, errno.EPERM),
        *refuse(BEGINS_A_PROCESS, errno.EAGAIN),
        *refuse(NEEDS_OTHER_CALLS, errno.ENOSYS),
        *check(CLONE, 0, some, values=(CLONE_THREAD,), error=errno.EAGAIN, ok=True),
        *check(KILL, 0, equal, values=(pid,), error=errno.EPERM, ok=True),
        *check(TGKILL, 0, equal, values=(pid,), error=errno.EPERM, ok=True),
        *check(PRLIMIT, 0, equal, values=(0, pid), error=errno.EPERM, ok=True),
        *check(PRCTL, 0, equal, values=(PARENT_DEATH_SIGNAL, PR_SET_DUMPABLE), error=errno.EPERM, ok=False),
        *check(FCNTL, 1, equal, values=(F_SETOWN, F_SETOWN_EX), error=errno.EPERM, ok=False),
        (give, 0, 0, allow),
    ]


def landlock_version() -> int:
    """Version of the kernel's Landlock; below 1 there is none."""
    return libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def _restrict_files(directory: str, readable: list) -> None:
    """Restrict this process to changing files in a directory, and to reading it and the `readable` paths."""
    version = landlock_version()
    rights = LANDLOCK_RIGHTS[min(version, len(LANDLOCK_RIGHTS)) - 1]
    scoped = 3 if version >= 6 else 0  # abstract sockets and signals beyond it
    ruleset = struct.pack("<QQQ", rights, 0, scoped)
    ruleset = ruleset[: 24 if version >= 6 else 16 if version >= 4 else 8]
    descriptor = _checked(libc.syscall(LANDLOCK_CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0))
    devices = [(path, READ_FILE | WRITE_FILE | TRUNCATE) for path in DEVICE_FILES]
    files = [(path, READ_RIGHTS if os.path.isdir(path) else READ_FILE) for path in (*readable, f"/proc/{os.getpid()}")]
    for path, allowed in ((directory, FILES_ONLY), *devices, *files):
        if not os.path.exists(path):
            continue
        where = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _checked(libc.syscall(LANDLOCK_ADD_RULE, descriptor, 1, struct.pack("<Qi", rights & allowed, where), 0))
        os.close(where)
    _checked(libc.syscall(LANDLOCK_RESTRICT_SELF, descriptor, 0))
    os.close(descriptor)


def _prctl(option: int, *arguments: object) -> None:
    given = [ctypes.c_ulong(x) if isinstance(x, int) else x for x in (*arguments, 0, 0, 0)[:4]]
    _checked(libc.prctl(option, *given))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def run(task: dict, result: int) -> None:
    """Run a program as a script, or followed by tests that see its names."""
    tests = task["tests"]
    module = types.ModuleType("program" if tests else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    exec(compile(task["program"], "program.py", "exec"), module.__dict__)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test_{number}.py", "exec"), module.__dict__)
        except (Exception, SystemExit):
            traceback.print_exc()
        else:
            os.write(result, f"{task['token']} {number}\n".encode())


def main() -> None:
    """Confine this process, then run its task."""
    task_file, result = map(int, sys.argv[1:3])
    with open(task_file) as file:
        task = json.load(file)
    confine(os.getcwd(), task["limits"], task["readable"], parent=task["parent"])
    os.write(result, b"confined\n")
    run(task, result)


if __name__ == "__main__":
    main()
