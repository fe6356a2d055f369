"""Recording a box's disk as a read-only layer, over which other boxes write.

A layer holds what a box wrote since the layers below it: files, folders, links, and overlayfs's marks of what
was removed. It lives in the zygote's mount namespace, from which every box inherits it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from lehr.sandbox.inside import rights
from lehr.sandbox.inside.wire import CHUNK

ROOT = "/run"
DISKS = ("work", "shm", "tmp")
OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OWN_INODES = 8
DEPTH = 256


def prepare() -> None:
    """Make the place in which layers are mounted."""
    rights.mount("layers", ROOT, "tmpfs", rights.MS_NOSUID | rights.MS_NODEV, "size=1m,mode=0700")


def make(number: int, disk_bytes: int, inodes: int) -> None:
    """Mount an empty layer."""
    folder = f"{ROOT}/{number}"
    os.mkdir(folder)
    size = f"size={disk_bytes},nr_inodes={inodes + OWN_INODES},mode=0755"
    rights.mount("layer", folder, "tmpfs", rights.MS_NOSUID | rights.MS_NODEV, size)


def seal(number: int) -> None:
    """Make a layer read-only."""
    flags = rights.MS_REMOUNT | rights.MS_RDONLY | rights.MS_NOSUID | rights.MS_NODEV
    rights.mount("layer", f"{ROOT}/{number}", "", flags)


def size(number: int) -> int:
    """Return the bytes that a layer takes."""
    info = os.statvfs(f"{ROOT}/{number}")
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def remove(number: int) -> None:
    """Unmount a layer. Boxes that stand on it keep it."""
    folder = f"{ROOT}/{number}"
    rights.LIBC.umount2(folder.encode(), rights.MNT_DETACH)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def record(disk: int, number: int) -> None:
    """Copy what a box wrote, whose disk is the folder ``disk``, into an empty layer. Raises ``OSError``."""
    top = os.open(f"{ROOT}/{number}", OPEN_DIR)
    links: dict[tuple[int, int], str] = {}
    for name in DISKS:
        _copy_folder(disk, name, top, f"{ROOT}/{number}/{name}", links, 0)


def _copy_folder(
    source: int, name: str, target: int, path: str, links: dict[tuple[int, int], str], depth: int
) -> None:
    """Copy one folder and all below it. Opened step by step, never through a link."""
    if depth > DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"deeper than {DEPTH} folders")
    there = os.open(name, OPEN_DIR, dir_fd=source)
    try:
        os.mkdir(name, 0o700, dir_fd=target)
        here = os.open(name, OPEN_DIR, dir_fd=target)
        try:
            for item in os.listdir(there):
                info = os.stat(item, dir_fd=there, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    _copy_folder(there, item, here, f"{path}/{item}", links, depth + 1)
                else:
                    _copy_item(there, item, info, here, f"{path}/{item}", links)
            info = os.fstat(there)
            _keep(here, there, info)
        finally:
            os.close(here)
    finally:
        os.close(there)


def _copy_item(
    there: int, name: str, info: os.stat_result, here: int, path: str, links: dict[tuple[int, int], str]
) -> None:
    key = (info.st_dev, info.st_ino)
    if info.st_nlink > 1 and key in links and stat.S_ISREG(info.st_mode):
        os.link(links[key], name, dst_dir_fd=here, follow_symlinks=False)
        return
    if stat.S_ISREG(info.st_mode):
        _copy_file(there, name, info, here)
        if info.st_nlink > 1:
            links[key] = path
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=there), name, dir_fd=here)
        _keep_name(name, info, here)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(name, 0o600, dir_fd=here)
        _keep_name(name, info, here)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=here)
    elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # overlayfs: removed
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=here)


def _copy_file(there: int, name: str, info: os.stat_result, here: int) -> None:
    source = os.open(name, OPEN_FILE, dir_fd=there)
    try:
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=here)
        try:
            for start, end in _extents(source, info.st_size):
                os.lseek(source, start, os.SEEK_SET)
                os.lseek(target, start, os.SEEK_SET)
                while start < end and (
                    count := os.sendfile(target, source, None, min(end - start, CHUNK << 6))
                ):
                    start += count
            os.ftruncate(target, info.st_size)
            _keep(target, source, info)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Return where a file has data, so that holes stay holes."""
    found: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        found.append((start, end))
    return found


def _keep_name(name: str, info: os.stat_result, here: int) -> None:
    os.chown(name, info.st_uid, info.st_gid, dir_fd=here, follow_symlinks=False)
    os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=here, follow_symlinks=False)


def _keep(target: int, source: int, info: os.stat_result) -> None:
    """Give a copy the owner, mode, times and user attributes of what it is a copy of."""
    with contextlib.suppress(OSError):  # a kernel whose tmpfs has none
        for name in os.listxattr(source):
            if name.startswith("user."):
                os.setxattr(target, name, os.getxattr(source, name))
    os.fchown(target, info.st_uid, info.st_gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
