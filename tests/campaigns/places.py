"""Harsh places for a command line: what is done to the folder of its outputs, and to its own process.

A harm of the folder is done in a forked process, before the command's own is forked from it, and returns a function
that undoes it. A harm of the process is done right before the command runs. Both end with their processes.
"""

import _thread
import builtins
import contextlib
import ctypes
import errno
import io
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000  # of unshare
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18  # of mount
CAPABILITIES = 0x20080522  # version 3 of capset
OVERRIDES = 0b110  # the capabilities to override permissions
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
KB, MB = 1 << 10, 1 << 20

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: Path | str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())


def own_mounts() -> None:
    """Give this process a mount namespace, by a user namespace where it must be; OSError where neither is allowed."""
    try:
        _call("unshare", CLONE_NEWNS)
    except OSError:
        user, group = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", "/", "none", MS_REC | MS_PRIVATE)


# Harms of the folder.


def full_disk(folder: Path, kilobytes: int) -> Callable[[], None]:
    """The folder has its files, and space for some more."""
    own_mounts()
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    _mount("tmpfs", folder, "tmpfs", 0, "size=64m")
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    status = os.statvfs(folder)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize // KB
    _mount("tmpfs", folder, "tmpfs", MS_REMOUNT, f"size={max(used + kilobytes, 4)}k")
    return lambda: _mount("tmpfs", folder, "tmpfs", MS_REMOUNT, "size=64m")


def few_inodes(folder: Path, inodes: int) -> Callable[[], None]:
    full_disk(folder, 64 * KB)
    status = os.statvfs(folder)
    used = status.f_files - status.f_ffree
    _mount("tmpfs", folder, "tmpfs", MS_REMOUNT, f"size=64m,nr_inodes={used + inodes}")
    return lambda: _mount("tmpfs", folder, "tmpfs", MS_REMOUNT, "size=64m,nr_inodes=9999")


def read_only_mount(folder: Path, _: object) -> Callable[[], None]:
    own_mounts()
    _mount(str(folder), folder, "none", MS_BIND)
    _mount("none", folder, "none", MS_BIND | MS_REMOUNT | MS_RDONLY)
    return lambda: _mount("none", folder, "none", MS_BIND | MS_REMOUNT)


def no_permission(folder: Path, mode: int) -> Callable[[], None]:
    folder.chmod(mode)
    return lambda: folder.chmod(0o755)


def in_the_way(folder: Path, given: tuple[str, str]) -> Callable[[], None]:
    """Something else has the name of an output or of a folder above it, where nothing has it yet."""
    path, kind = folder / given[0], given[1]
    if os.path.lexists(path):
        return lambda: None
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere") if kind == "link" else path.write_text(kind)

    def undo() -> None:
        if path.is_symlink() or path.is_fifo() or (path.is_file() and path.read_bytes() == kind.encode()):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()

    return undo


# Harms of the process.


def obey_permissions() -> None:
    """Permissions bind this process as they bind a user, also where it is root's."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
        words = Path("/proc/self/status").read_text().splitlines()
        sets = [int(line.split()[1], 16) for name in ("CapEff", "CapPrm") for line in words if line.startswith(name)]
        kept = [found & ~OVERRIDES for found in sets]
        data = (ctypes.c_uint32 * 6)(*[part >> shift & 0xFFFFFFFF for shift in (0, 32) for part in (*kept, 0)])
        if LIBC.syscall(SYS_CAPSET[os.uname().machine], header, data):
            raise OSError(ctypes.get_errno(), "capset")


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def short_files(size: int) -> None:
    _limit(resource.RLIMIT_FSIZE, size)


def little_memory(kilobytes: int) -> None:
    """More than the process has now, by so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + kilobytes * KB)


def few_descriptors(more: int) -> None:
    _limit(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + more)


def gone_folder(_: object) -> None:
    """The working directory is removed."""
    gone = Path(tempfile.mkdtemp(dir=".", prefix="gone-"))
    os.chdir(gone)
    os.rmdir(Path.cwd())


def bad_variables(given: tuple[tuple[str, str | None], ...]) -> None:
    for name, value in given:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def stream(given: tuple[str, str]) -> None:
    """stdout, stderr or stdin is closed or full, or its reader is gone."""
    name, how = given
    number = ("stdin", "stdout", "stderr").index(name)
    if how == "closed":
        os.close(number)
        setattr(sys, name, None)
    elif how == "full":
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, number)
        os.close(full)
    else:
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(reader)
        os.close(writer)


FAULTY = {  # a function, and the module that callers take it from
    name: module
    for module, names in (
        (os, "open mkdir rmdir unlink rename replace stat lstat scandir listdir fsync access chmod"),
        (io, "open"),
        (threading, "_start_new_thread"),
        (_thread, "start_new_thread"),
        (os, "fork"),
    )
    for name in [f"{module.__name__}.{each}" for each in names.split()]
}
ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EAGAIN]


def faults(given: tuple[str, int, int, bool]) -> None:
    """The n-th call of a function of Python's fails, or all from then on."""
    name, number, first, again = given
    module, attribute = FAULTY[name], name.partition(".")[2]
    call, calls = getattr(module, attribute), 0

    def faulty(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == first or (again and calls > first):
            if module in (threading, _thread):
                raise RuntimeError("can't start new thread")
            raise OSError(number, os.strerror(number))
        return call(*arguments, **options)

    setattr(module, attribute, faulty)
    if name == "io.open":
        builtins.open = faulty


def full_file(first: int) -> None:
    """The n-th file that Python opens to write finds no space when it is written or closed."""
    call, opened = io.open, 0

    def full(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        nonlocal opened
        if "w" in mode and not isinstance(file, int):
            opened += 1
            if opened == first:
                call(file, "w").close()
                file = "/dev/full"
        return call(file, mode, *arguments, **options)

    io.open = builtins.open = full


VARIABLES = ["HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "PATH"]
CACHES = ("relative", "\udcff")  # folders that the variables name
VALUES = [None, "", "/nowhere/deep", "/proc", "/dev/null", *CACHES]
FOLDER_HARMS: dict[Callable[..., Any], st.SearchStrategy[Any]] = {
    full_disk: st.integers(0, 40) | st.integers(0, 300),
    few_inodes: st.integers(0, 8),
    read_only_mount: st.none(),
    no_permission: st.sampled_from([0o555, 0o000, 0o444, 0o333, 0o666]),
    in_the_way: st.tuples(
        st.sampled_from(["out", "deep", "page.html", "a.png", "a.pdf", "a.onnx", "a.pt2"]),
        st.sampled_from(["link", "file", "folder", "pipe"]),
    ),
}
TRIED = {no_permission: 0o555, in_the_way: ("out", "file")}  # by `not_allowed`
PROCESS_HARMS: dict[Callable[..., Any], st.SearchStrategy[Any]] = {
    full_file: st.integers(1, 12),
    short_files: st.integers(0, 5000) | st.integers(0, 100_000),
    few_descriptors: st.integers(1, 30),
    gone_folder: st.none(),
    bad_variables: st.lists(st.tuples(st.sampled_from(VARIABLES), st.sampled_from(VALUES)), min_size=1, max_size=3).map(
        tuple
    ),
    stream: st.tuples(st.sampled_from(["stdin", "stdout", "stderr"]), st.sampled_from(["closed", "full", "gone"])),
    little_memory: st.integers(6000, 15_000) | st.integers(6000, 200_000),  # with less, Python raises SystemErrors
    faults: st.tuples(
        st.sampled_from(sorted(FAULTY)),
        st.sampled_from(ERRORS),
        st.integers(1, 10) | st.integers(1, 100),
        st.booleans(),
    ).filter(lambda given: given[0] != "os.lstat" or not given[3]),  # which whoever removes a folder needs
}


def not_allowed(harm: Callable[..., Any], folder: Path) -> str | None:
    """Why this machine does not let the folder be harmed so; None where it does."""
    try:
        undo = harm(folder, TRIED.get(harm, 8))
        if harm is no_permission:
            obey_permissions()
            with contextlib.suppress(PermissionError):
                (folder / "tried").touch()
                return "permissions do not bind"
        undo()
    except (OSError, KeyError) as error:
        return str(error)
    return None
