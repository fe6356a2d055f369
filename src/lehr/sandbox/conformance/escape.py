"""Escape: nothing of the host is visible or reachable, and no call widens the box."""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path

import lehr
from lehr.sandbox.base import Boxes
from lehr.sandbox.conformance.basis import Case, expect, python, spec

CALLS = """
import ctypes, errno, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
other = platform.machine() in ('aarch64', 'riscv64')
def call(name, *arguments):
    x86, generic = NUMBERS[name]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(generic if other else x86), *arguments)
    if result == 0 and name in ('clone', 'clone3'): os._exit(0)
    return errno.errorcode.get(ctypes.get_errno(), 'done') if result < 0 else 'done'
NUMBERS = {'mount': (165, 40), 'umount2': (166, 39), 'unshare': (272, 97), 'setns': (308, 268),
    'clone': (56, 220),
    'clone3': (435, 435), 'fsopen': (430, 430), 'open_tree': (428, 428), 'move_mount': (429, 429),
    'fsmount': (432, 432), 'mount_setattr': (442, 442), 'pivot_root': (155, 41), 'ptrace': (101, 117),
    'bpf': (321, 280), 'io_uring_setup': (425, 425), 'userfaultfd': (323, 282), 'perf_event_open': (298, 241),
    'keyctl': (250, 219), 'add_key': (248, 217), 'pidfd_getfd': (438, 438), 'process_vm_writev': (311, 271)}
"""

OTHER_CONVENTION = """
import ctypes, mmap, os, platform, signal
page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
page.write(bytes.fromhex('53b814000000cd805bc3'))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
pid = os.fork()
if pid == 0:
    if platform.machine() == 'x86_64':
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSYS)
status = os.waitpid(pid, 0)[1]
print('refused' if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS else status)
"""


async def s13_host_secrets(boxes: Boxes) -> None:
    """The host's environment, homes, keys, shadow file, processes and this installation are absent."""
    secret = secrets.token_hex(16)
    os.environ["LEHR_CONFORMANCE_SECRET"] = secret
    package = str(Path(lehr.__file__).parent)
    code = f"""
import glob, json, os
def text(path):
    try: return open(path, 'rb').read().decode('latin-1')
    except OSError: return ''
def names(path):
    try: return os.listdir(path)
    except OSError: return []
import importlib.util
print(json.dumps({{
    'environment': sorted(os.environ),
    'environs': ''.join(map(text, glob.glob('/proc/[0-9]*/environ'))),
    'shadow': text('/etc/shadow') + text('/etc/gshadow'),
    'homes': names('/root') + names('/home') + names(os.path.expanduser('~/.ssh')),
    'processes': [text(p) for p in glob.glob('/proc/[0-9]*/cmdline')],
    'package': os.path.exists({package!r}),
    'import': importlib.util.find_spec('lehr') is not None,
    'cwd': os.path.exists({os.getcwd()!r}) and {os.getcwd()!r} not in ('/', '/tmp', '/work'),
    'root': sorted(os.listdir('/')),
}}))
"""
    try:
        async with boxes.lease(spec()) as box:
            result = await python(box, code)
    finally:
        del os.environ["LEHR_CONFORMANCE_SECRET"]
    expect(result.verdict == "ok", "looking around is no crime", result)
    seen = json.loads(result.stdout)
    expect(secret not in result.stdout.decode(), "the host's environment is absent")
    expect(
        set(seen["environment"]) <= {"PATH", "HOME", "LANG", "LC_CTYPE", "TMPDIR", "USER", "PWD"},
        "no variables",
        seen,
    )
    expect(not seen["shadow"] and not seen["homes"], "homes, keys and shadow files are absent", seen)
    expect(len(seen["processes"]) <= 3, "the host's processes are absent", seen["processes"])
    expect(not seen["package"] and not seen["import"], "this installation is absent", seen)
    expect(not seen["cwd"], "the host's working folder is absent", seen["root"])


async def s14_descriptors(boxes: Boxes) -> None:
    """A program starts with descriptors 0, 1 and 2, whatever the host has open."""
    code = """
import os
for fd in range(3, 1025):
    try: print(fd, os.fstat(fd))
    except OSError: pass
"""
    inherited = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    for fd in inherited:
        os.set_inheritable(fd, True)
    os.dup2(inherited[0], 700, inheritable=True)
    try:
        async with boxes.lease(spec()) as box:
            result = await python(box, code)
            expect(result.verdict == "ok" and result.stdout == b"", "no other descriptor is open", result)
            shell = await box.shell()
            result = await shell.run(f"python3 -I -c '{code}'".replace("\\n", "\n"))
            expect(result.verdict == "ok" and result.stdout == b"", "nor in a shell", result)
    finally:
        for fd in (*inherited, 700):
            os.close(fd)


async def s17_calls(boxes: Boxes) -> None:
    """Calls that mount, make namespaces or trace are refused; clone3 does not exist."""
    code = (
        CALLS
        + """
new = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
print(json.dumps({
    'mount': call('mount', b'x', b'/tmp', b'tmpfs', 0, None), 'umount2': call('umount2', b'/work', 2),
    'fsopen': call('fsopen', b'tmpfs', 0), 'open_tree': call('open_tree', -100, b'/work', 1),
    'move_mount': call('move_mount', -100, b'/', -100, b'/tmp', 0),
    'fsmount': call('fsmount', 0, 0, 0),
    'mount_setattr': call('mount_setattr', -100, b'/', 0, None, 0),
    'pivot_root': call('pivot_root', b'/', b'/tmp'),
    'setns': call('setns', 0, 0), 'ptrace': call('ptrace', 16, 1, 0, 0), 'bpf': call('bpf', 0, None, 0),
    'io_uring_setup': call('io_uring_setup', 1, None), 'userfaultfd': call('userfaultfd', 1),
    'perf_event_open': call('perf_event_open', None, 0, -1, -1, 0), 'keyctl': call('keyctl', 0, -3, 0),
    'add_key': call('add_key', b'user', b'a', b'b', 1, -2), 'pidfd_getfd': call('pidfd_getfd', 0, 0, 0),
    'process_vm_writev': call('process_vm_writev', 1, None, 0, None, 0, 0),
    **{'unshare %x' % flag: call('unshare', flag) for flag in new},
    **{'clone %x' % flag: call('clone', flag | 17, None, None, None, None) for flag in new},
}))
"""
    )
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        expect(result.verdict == "ok", "refused calls do not kill", result)
        wrong = {name: seen for name, seen in json.loads(result.stdout).items() if seen != "EPERM"}
        expect(not wrong, "each is refused with EPERM", wrong)
        result = await python(box, CALLS + "print(call('clone3', bytes(88), 88))")
        expect(result.stdout == b"ENOSYS\n", "clone3 is absent, so that libc falls back to clone", result)


async def s17_convention(boxes: Boxes) -> None:
    """A call by another convention than the machine's own ends the program."""
    async with boxes.lease(spec()) as box:
        result = await python(box, OTHER_CONVENTION)
        expect(result.stdout == b"refused\n", "the 32-bit convention is no way around", result)


async def s23_network(boxes: Boxes) -> None:
    """No address answers: internet, metadata service, the host's loopback, a name server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
reached = []
for family, address in ((2, ('1.1.1.1', 53)), (2, ('169.254.169.254', 80)), (2, ('127.0.0.1', {port})),
                        (2, ('10.0.0.1', 80)), (10, ('2606:4700:4700::1111', 53))):
    try:
        with socket.socket(family) as s:
            s.settimeout(0.5)
            s.connect(address)
            reached.append(address)
    except OSError: pass
try: reached.append(socket.getaddrinfo('example.com', 80))
except OSError: pass
with socket.socket(2, socket.SOCK_DGRAM) as s:
    try: reached.append(s.sendto(b'x', ('8.8.8.8', 53)))
    except OSError: pass
for family in (16, 17, 38, 40):
    try: socket.socket(family, socket.SOCK_RAW).close(); reached.append(family)
    except OSError: pass
links = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]
print(reached, links)
"""
        async with boxes.lease(spec()) as box:
            result = await python(box, code)
    expect(result.stdout == b"[] ['lo']\n", "nothing is reachable and only loopback exists", result)


ESCAPE: dict[str, Case] = {
    "S13": s13_host_secrets,
    "S14": s14_descriptors,
    "S17": s17_calls,
    "S17-convention": s17_convention,
    "S23": s23_network,
}
