"""The program `python` of a test that has `warm_programs`: a server that has imported torch runs its line.

It passes on its arguments, folder, environment and open files, then signals, and ends as the process does
that ran the line. It starts without site-packages and imports next to nothing, so it is there at once.
"""

import _signal as signal  # the module without the underscore, and socket, cost more than all the rest
import _socket as socket
import marshal
import os
import sys

LENGTH_BYTES = 8
LOOK_SECONDS = 0.2
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(program, address):
    """Have the server whose socket is at `address` run `program` with our arguments; never returns."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until they can be passed on
    files = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if is_inherited(fd))  # noqa: PTH208
    takes_ctrl_c = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    request = (program, sys.argv[1:], os.getcwd(), dict(os.environ), files, takes_ctrl_c)  # noqa: PTH109
    text = marshal.dumps(request)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    numbers = b"".join(fd.to_bytes(4, sys.byteorder) for fd in files)
    server.sendmsg(
        [len(text).to_bytes(LENGTH_BYTES, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
    )
    server.sendall(text)
    for fd in files:
        if fd != 2:
            os.close(fd)  # whoever is at the other end sees when the program closes it
    pid = int.from_bytes(exactly(server, LENGTH_BYTES), "big")
    for number in FORWARDED:
        signal.signal(number, lambda number, _: pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    server.settimeout(LOOK_SECONDS)  # a signal on the way into recv() waits until recv() comes back
    status = int.from_bytes(exactly(server, LENGTH_BYTES), "big", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def exactly(connection, length):
    """So many bytes. Raises EOFError where the other side is gone first."""
    found = b""
    while len(found) < length:
        try:
            more = connection.recv(length - len(found))
        except TimeoutError:
            continue
        if not more:
            raise EOFError("the other side has closed the connection")
        found += more
    return found


def is_inherited(fd):
    """Not the one that listed the folder, which is closed by now."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def pass_on(pid, number):
    try:  # noqa: SIM105 - contextlib takes its time
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended
