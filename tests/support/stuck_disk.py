"""A file system whose disk never answers, and a program beside it: `stuck_disk.py DIR CMD…`, in a mount namespace.

Who looks for a file in DIR/dead waits for ever, and cannot be killed. DIR/file can be read and mapped; who writes what
is in it to the disk waits so too. All go on, with an error, when CMD has ended. Needs root and /dev/fuse.
"""

import ctypes
import os
import struct
import subprocess
import sys
import threading

LOOKUP, GETATTR, OPEN, READ, INIT, FLUSH, RELEASE = 1, 3, 14, 15, 26, 25, 18
FOLDER, FILE = 0o40755, 0o100644
NODES = {b"file": (2, FILE), b"dead": (3, FOLDER)}
MODES = {1: FOLDER, 2: FILE, 3: FOLDER}


def mount(directory: str) -> int:
    """Mount it; the descriptor of its requests."""
    requests = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={requests},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"stuck", directory.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    return requests


def attributes(node: int) -> bytes:
    return struct.pack("<QQQQQQIIIIIIIIII", node, 1 << 20, 8, 0, 0, 0, 0, 0, 0, MODES[node], 1, 0, 0, 0, 4096, 0)


def answer(code: int, node: int, body: bytes) -> bytes | None:
    """What the file system says; None: nothing, ever."""
    if code == INIT:
        return struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 16, 8, 1 << 16, 1, 0, 0, 0, *[0] * 7)
    if code == LOOKUP and node == 1 and body.rstrip(b"\0") in NODES:
        number, _ = NODES[body.rstrip(b"\0")]
        return struct.pack("<QQQQII", number, 0, 1000, 1000, 0, 0) + attributes(number)
    if code == GETATTR:
        return struct.pack("<QII", 1000, 0, 0) + attributes(node)
    if code == OPEN:
        return struct.pack("<QII", 0, 0, 0)
    if code == READ:
        return bytes(struct.unpack_from("<QQI", body)[2])
    return b"" if code in (FLUSH, RELEASE) else None


def serve(requests: int) -> None:
    while True:
        data = os.read(requests, 1 << 18)
        length, code, unique, node = struct.unpack_from("<IIQQ", data)
        said = answer(code, node, data[40:length])
        if said is not None:
            os.write(requests, struct.pack("<IiQ", 16 + len(said), 0, unique) + said)


def main() -> None:
    requests = mount(sys.argv[1])
    threading.Thread(target=serve, args=(requests,), daemon=True).start()
    code = subprocess.run(sys.argv[2:]).returncode
    sys.stdout.flush()
    os._exit(code)  # the descriptor closes, and who waits hears that the disk is gone


if __name__ == "__main__":
    main()
