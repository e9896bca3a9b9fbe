"""What Python does meanwhile: files, sockets, processes, modules and code that data may not cause are refused.

A process can have an audit hook, but cannot lose it: this one does nothing outside `watched`.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dcls_convert

PACKAGE = Path(dcls_convert.__file__).parent
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
READABLE = (  # besides the watched folders
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},  # data files of libraries
    str(PACKAGE),
    str(PACKAGE.parent / "rules"),  # of the package in a checkout
    "/proc",  # torch and psutil count processors and memory
    "/sys",
)
WRITABLE = ("/dev/null",)
CHANGES = {f"os.{name}" for name in "mkdir rename remove rmdir link symlink truncate chmod chown utime".split()}
STARTS = {f"os.{name}" for name in "system exec posix_spawn spawn fork forkpty".split()}
# Libraries that make functions of their own from text: they call exec, and data is none of it.
MAKERS = tuple(f"{name}.py" for name in ("dataclasses", "typing", "collections/__init__", "fx/graph_module"))


class Refused(RuntimeError):
    """Data tried to cause this."""


class _Watch:
    def __init__(self, folders: tuple[object, ...]) -> None:
        self.folders = tuple(map(str, folders))
        self.events: list[str] = []
        self.known = {name.partition(".")[0] for name in sys.modules}

    def allows(self, event: str, args: tuple) -> bool:
        match event.partition(".")[0]:
            case "open":
                return self._may_open(*args) or self._importing()
            case "os":
                paths = [path for path in args if isinstance(path, str | bytes)]
                return event not in STARTS and (event not in CHANGES or all(_is_in(p, self.folders) for p in paths))
            case "import":
                return args[0].partition(".")[0] in self.known or self._importing()
            case "exec" | "compile" | "marshal":
                return sys._getframe(2).f_code.co_filename.endswith(MAKERS) or self._importing()
            case "socket" | "subprocess" | "urllib" | "pty":
                return False
        return event != "pickle.find_class"

    def _importing(self) -> bool:
        """Whether Python is importing more of a library that was there before; then it opens files and runs code."""
        frame, name = sys._getframe(), ""
        while frame := frame.f_back:
            if frame.f_code.co_name == "_find_and_load" and "importlib" in frame.f_code.co_filename:
                name = frame.f_locals["name"]  # in the end the first of imports inside each other
        return name.partition(".")[0] in self.known

    def _may_open(self, path: object, _mode: object, flags: int) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a descriptor, which was opened before
        writes = flags & WRITES
        return _is_in(path, (*self.folders, *WRITABLE, *(() if writes else READABLE)))


_watch: _Watch | None = None


@contextmanager
def watched(*folders: object) -> Iterator[list[str]]:
    """The list of what was refused inside the block, in which these folders alone may be read and written.

    Libraries that were imported before may import more of themselves.
    """
    global _watch
    _watch = watch = _Watch(folders)
    try:
        yield watch.events
    finally:
        _watch = None


def _hook(event: str, args: tuple) -> None:
    if _watch is None or _watch.allows(event, args):
        return
    _watch.events.append(f"{event} {str(args)[:200]}")
    raise Refused(_watch.events[-1])


def _is_in(path: object, folders: tuple[str, ...]) -> bool:
    """By its name: links lead out of the hub's cache too, and are followed."""
    found = os.path.abspath(os.fsdecode(path))
    return any(found == folder or found.startswith(f"{folder}{os.sep}") for folder in folders)


sys.addaudithook(_hook)
