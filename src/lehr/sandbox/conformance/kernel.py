"""The kernel's surface: terminals, devices, tracing, control groups, priorities, dumps."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lehr.sandbox.base import Boxes
from lehr.sandbox.conformance.basis import MIB, Case, expect, expect_works, python, spec

TRIED = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(call, *arguments):
    try:
        call(*arguments)
        return 'done'
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    except ValueError as error:
        return 'ValueError'
def checked(result):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
"""


async def s15_terminal_input(boxes: Boxes) -> None:
    """Input cannot be pushed into a terminal, also when the request's high bits are set."""
    code = (
        TRIED
        + """
import fcntl, pty
parent, child = pty.openpty() if os.path.exists('/dev/ptmx') else (0, 0)
byte = ctypes.create_string_buffer(b'x')
seen = {}
for name, request in (('TIOCSTI', 0x5412), ('TIOCLINUX', 0x541c)):
    for high in (0, 1 << 32, 0xffffffff << 32):
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(16 if os.uname().machine == 'x86_64' else 29),
                              ctypes.c_long(child), ctypes.c_ulong(request | high), byte)
        seen[f'{name} {high:x}'] = errno.errorcode.get(ctypes.get_errno(), 'done') if result < 0 else 'done'
print(json.dumps(seen))
"""
    )
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        seen = json.loads(result.stdout or b"{}")
        expect(len(seen) == 6 and set(seen.values()) == {"EPERM"}, "pushing input is refused", result)


async def s16_devices(boxes: Boxes) -> None:
    """No device but null, zero, full, random and urandom is there, and none can be made."""
    code = (
        TRIED
        + """
import stat
there = [n for n in os.listdir('/dev') if n != 'fd' and not n.startswith('std')
         and stat.S_IFMT(os.lstat('/dev/' + n).st_mode) in (stat.S_IFCHR, stat.S_IFBLK)]
made = {f'{kind} {major}:{minor}': tried(os.mknod, '/work/node', mode | 0o600, os.makedev(major, minor))
        for kind, mode in (('c', stat.S_IFCHR), ('b', stat.S_IFBLK))
        for major, minor in ((1, 1), (1, 3), (10, 232), (7, 0), (8, 0))}
print(json.dumps([sorted(there), made]))
"""
    )
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        there, made = json.loads(result.stdout or b"[[], {}]")
        allowed = {"null", "zero", "full", "random", "urandom"}
        expect(bool(there) and set(there) <= allowed, "no other device is there", (there, result.stderr))
        expect(len(made) == 10 and "done" not in made.values(), "no device can be made", made)


async def s18_kernel_interfaces(boxes: Boxes) -> None:
    """io_uring, bpf, userfaultfd, perf_event_open and keys are refused, whatever the arguments."""
    code = (
        TRIED
        + """
other = os.uname().machine != 'x86_64'
numbers = {'io_uring_setup': (425, 425), 'io_uring_enter': (426, 426), 'io_uring_register': (427, 427),
    'bpf': (321, 280), 'userfaultfd': (323, 282), 'perf_event_open': (298, 241), 'keyctl': (250, 219),
    'add_key': (248, 217), 'request_key': (249, 218)}
block = ctypes.create_string_buffer(256)
seen = {}
for name, both in numbers.items():
    for arguments in ((0, 0, 0, 0, 0), (1, block, 256, 0, 0), (8, block, block, 1, -2), (-1, -1, -1, -1, -1)):
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(both[other]), *arguments)
        word = errno.errorcode.get(ctypes.get_errno(), 'done') if result < 0 else 'done'
        seen.setdefault(name, set()).add(word)
print(json.dumps({name: sorted(words) for name, words in seen.items()}))
"""
    )
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        seen = json.loads(result.stdout or b"{}")
        wrong = {name: words for name, words in seen.items() if words != ["EPERM"]}
        expect(len(seen) == 9 and not wrong, "each is refused with EPERM", wrong or result)


async def s19_tracing(boxes: Boxes) -> None:
    """Process 1 cannot be traced, read, written, slowed or robbed of a descriptor; nor can another program."""
    code = (
        TRIED
        + """
import subprocess
other = os.uname().machine != 'x86_64'
child = subprocess.Popen(['sleep', '5'])
seen = {}
class Vector(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
block = ctypes.create_string_buffer(64)
here = Vector(ctypes.addressof(block), 64)
def number(name):
    return ctypes.c_long({'ptrace': (101, 117), 'readv': (310, 270), 'writev': (311, 271),
        'pidfd_open': (434, 434), 'pidfd_getfd': (438, 438)}[name][other])
for pid in (1, child.pid):
    for request in (16, 0x4206):
        seen[f'ptrace {request} {pid == 1}'] = tried(
            lambda: checked(libc.syscall(number('ptrace'), request, pid, 0, 0)))
    for name in ('readv', 'writev'):
        seen[f'{name} {pid == 1}'] = tried(
            lambda: checked(libc.syscall(number(name), pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0)))
    pidfd = libc.syscall(number('pidfd_open'), pid, 0)
    seen[f'getfd {pid == 1}'] = tried(lambda: checked(libc.syscall(number('pidfd_getfd'), pidfd, 0, 0)))
for name in ('mem', 'environ', 'maps', 'auxv'):
    seen['/proc/1/' + name] = tried(lambda: open('/proc/1/' + name, 'rb').read(1) or checked(-1))
for name in ('fd', 'task/1/fd', 'map_files'):
    seen['/proc/1/' + name] = tried(os.listdir, '/proc/1/' + name)
for name in ('exe', 'root', 'cwd'):
    seen['/proc/1/' + name] = tried(os.readlink, '/proc/1/' + name)
for signal in (0, 9, 15, 19):
    if signal: seen[f'signal {signal}'] = 'EPERM' if tried(os.kill, 1, signal) in ('EPERM', 'done') else 'other'
child.kill()
print(json.dumps(seen))
"""
    )
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        seen = json.loads(result.stdout or b"{}")
        wrong = {
            name: word for name, word in seen.items() if word not in ("EPERM", "EACCES", "ENOENT", "ESRCH")
        }
        expect(len(seen) > 18 and not wrong, "nothing of process 1 is open to a program", wrong or result)
        await expect_works(box, "attempts to trace")


async def s20_control_groups(boxes: Boxes) -> None:
    """No control group file is there, no release agent, and nothing of /sys."""
    code = """
import os
found = []
for folder, folders, names in os.walk('/', onerror=lambda e: None):
    if folder == '/':
        folders[:] = [n for n in folders if n not in ('proc', 'usr')]
    found += [os.path.join(folder, n) for n in names + folders
              if n in ('cgroup.procs', 'tasks', 'release_agent', 'notify_on_release', 'cgroup')]
kinds = {line.split(' - ')[1].split()[0] for line in open('/proc/self/mountinfo')}
print(found, sorted(kinds & {'cgroup', 'cgroup2', 'sysfs', 'debugfs', 'securityfs', 'bpf', 'tracefs'}),
      os.path.exists('/sys/kernel'))
print(sorted({line.split(':')[2].strip() for line in open('/proc/self/cgroup')}))
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        first, _, second = result.stdout.decode().partition("\n")
        expect(first == "[] [] False", "no control group is visible", result)
        expect(second.strip() in ("['/']", "[]"), "nor where this one is in the host's", second)


async def s24_priorities_and_dumps(boxes: Boxes) -> None:
    """Limits cannot be raised nor priorities won, and a program that dies leaves no dump behind."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    folder = Path(pattern).parent if pattern.startswith("/") else Path.cwd()
    before = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    code = (
        TRIED
        + """
import resource
raised = {}
for name in ('CORE', 'NOFILE', 'FSIZE', 'CPU', 'RTPRIO', 'NICE', 'MEMLOCK'):
    kind = getattr(resource, 'RLIMIT_' + name, None)
    if kind is not None:
        hard = resource.getrlimit(kind)[1]
        raised[name] = 'infinite' if hard == resource.RLIM_INFINITY else tried(
            resource.setrlimit, kind, (hard + 1, hard + 1))
seen = {
    'nice': tried(os.setpriority, os.PRIO_PROCESS, 0, -20), 'raised': raised,
    'realtime': tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    'ioprio': tried(lambda: checked(libc.syscall(
        ctypes.c_long(251 if os.uname().machine == 'x86_64' else 30), 1, 0, (1 << 13) | 0))),
    'oom': tried(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')),
}
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(4 << 20)
        os.abort()
while True:
    try: os.wait()
    except ChildProcessError: break
seen['dumps'] = [name for name in os.listdir('/work') + os.listdir('/tmp') if 'core' in name]
print(json.dumps(seen))
"""
    )
    async with boxes.lease(spec(memory_bytes=128 * MIB)) as box:
        result = await python(box, code)
        seen = json.loads(result.stdout or b"{}")
        expect(bool(seen), "the attempts are survived", result)
        for name in ("nice", "realtime", "ioprio", "oom"):
            expect(seen[name] in ("EPERM", "EACCES"), f"{name} is refused", seen)
        wrong = {name: word for name, word in seen["raised"].items() if word not in ("EPERM", "ValueError")}
        expect(not wrong, "no limit can be raised", wrong)
        expect(not seen["dumps"], "no dump is left in the box", seen["dumps"])
    after = set(os.listdir(folder)) if folder.is_dir() else set[str]()
    left = [name for name in after - before if "core" in name]
    expect(not left, "no dump is left on the host", left)


KERNEL: dict[str, Case] = {
    "S15": s15_terminal_input,
    "S16": s16_devices,
    "S18": s18_kernel_interfaces,
    "S19": s19_tracing,
    "S20": s20_control_groups,
    "S24": s24_priorities_and_dumps,
}
