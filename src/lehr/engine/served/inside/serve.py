"""Runs a server's module in the server's own environment: ``serve.py MODULE ARGUMENT...``.

Imports nothing of lehr. The process gets a SIGTERM when the one that started it dies, and finds ``guard``
beside this file as a module.
"""

import ctypes
import os
import runpy
import signal
import sys

_SET_DEATH_SIGNAL = 1


def main() -> None:
    """Tie the process to its parent and become MODULE."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(os.environ.get("LEHR_PARENT", os.getppid())):
        sys.exit("the process that started this server is gone")
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    if flag := os.environ.get("LEHR_TOKEN_FLAG"):  # added here, where a list of processes does not show it
        sys.argv += [flag, os.environ["LEHR_SERVER_TOKEN"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
