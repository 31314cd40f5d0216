"""Where files of this user go, if the system knows neither a home nor a name of the user, as in many containers."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from collections.abc import Mapping, MutableMapping

__all__ = ["give_home", "home"]


def home(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's home, or a folder of this user's alone among the temporary ones."""
    found = environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(found):
        return found
    folder = os.path.join(tempfile.gettempdir(), f"dlrover-home-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.lstat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set HOME to a folder of your own")
    return folder


def give_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a home and a name to a user who has none: TorchX, torch's compiler and others fail without them.

    Raises:
        PermissionError: the place for a home is another user's.
    """
    environ["HOME"] = home(environ)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        environ["LOGNAME"] = f"user-{os.getuid()}"
