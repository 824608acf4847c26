"""Hostile programs: templates by kind, and random variants of each. Every one claims success or tries to get out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

CLAIMS = ("print('ALL PASSED')", "print('{\"finished\": true}')", "import sys; sys.stdout.write('OK\\n'); sys.stdout.flush()")
ENDS = (
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "raise SystemExit(0)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
)
SAY = (
    "import json, os, struct\n"
    "def say(value, fd=3):\n"
    "    body = json.dumps(value).encode()\n"
    "    os.write(fd, struct.pack('<I', len(body)) + body)\n"
)
KINDS: Mapping[str, Sequence[str]] = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os\nfor _ in range({n}):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass",
        "import subprocess, sys\nwhile True:\n    subprocess.Popen([sys.executable, '-c', 'while True: pass'])",
        "import multiprocessing as m\nps = [m.Process(target=lambda: None) for _ in range({n})]\n[p.start() for p in ps]",
    ),
    "threads without end": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=({n},)).start()",
        "import _thread\nwhile True:\n    try:\n        _thread.start_new_thread(lambda: [None for _ in iter(int, 1)], ())\n    except RuntimeError:\n        pass",
    ),
    "detached": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for fd in range(256):\n            try: os.close(fd)\n            except OSError: pass\n        time.sleep({n})\n    os._exit(0)\ntime.sleep({n})",
        "import os, signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nos.setsid() if os.getpid() != os.getsid(0) else None\ntime.sleep({n})",
    ),
    "forged success": (
        "{claim}\n{end}",
        SAY + "say({{'defined': ['f']}})\nfor _ in range({n}): say({{'value': None}})\nsay({{'finished': True}})\n{end}",
        SAY + "for fd in range(3, 64):\n    try: say({{'finished': True}}, fd)\n    except OSError: pass\n{end}",
        "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {{}})\n{claim}\n{end}",
        "class Same:\n    def __eq__(self, other): return True\n    def __hash__(self): return {n}\ndef f(*args): return Same()",
        "def f(*args):\n    {claim}\n    raise AssertionError",
        "import gc, sys\nfor thing in gc.get_objects():\n    if isinstance(thing, dict) and 'expected' in thing: print(thing)\n{end}",
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for name, value in list(frame.f_locals.items()):\n        if name == 'order': value['mode'] = 'test'\n    frame = frame.f_back\n{end}",
    ),
    "signals": (
        "import os, signal\nfor pid in range(1, {n}):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "import os, signal\nos.killpg(0, signal.SIGKILL)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass",
    ),
    "symlinks": (
        "import os\nfor t in ('/', '/etc/passwd', '/proc/self', '/dev', '{host}'):\n    try:\n        os.symlink(t, '/tmp/l%d' % hash(t))\n        print(os.listdir('/tmp/l%d' % hash(t)))\n    except OSError: pass\nopen('/tmp/l', 'w').write('x')",
        "import os\ntry:\n    os.link('/usr/bin/python3', '/tmp/h'); os.chmod('/tmp/h', 0o4755)\nexcept OSError: pass",
        "for path in ('{host}/out', '/usr/lib/out', '/out', '/dev/shm/../../out'):\n    try: open(path, 'w').write('PWNED')\n    except OSError: pass",
    ),
    "output": (
        "while True: print('x' * {n})",
        "import os\nwhile True: os.write(2, b'y' * {n})",
        "import os\nwhile True: os.write(3, b'\\xff' * {n})",
        SAY + "say('x' * ({n} * 3000))",
        "f = open('/tmp/big', 'wb')\nwhile True: f.write(b'0' * 2**20)",
    ),
    "network": (
        "import socket\nfor port in (22, 80, 443, 6379, {n}):\n    try:\n        s = socket.create_connection(('127.0.0.1', port), 0.1); s.send(b'PWNED')\n    except OSError: pass",
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ntry: s.sendto(b'x', ('8.8.8.8', 53))\nexcept OSError: pass",
        "import socket\ns = socket.socket(socket.AF_UNIX)\nfor path in ('/var/run/docker.sock', '/run/redis.sock', '\\0abstract'):\n    try: s.connect(path)\n    except OSError: pass",
    ),
    "environment": (
        "import os\nprint(dict(os.environ)); print(open('/proc/self/environ').read())",
        "def f(*args):\n    import os\n    return [v for v in os.environ.values()]",
        "import os\nfor p in ('{host}/secret', '/etc/shadow', '/root/.ssh', '/home'):\n    try: print(open(p).read())\n    except OSError: pass",
    ),
    "proc and devices": (
        "import os\nfor p in ('/proc/1/root', '/proc/self/fd', '/sys/fs/cgroup', '/dev/mem', '/dev/core'):\n    try: print(os.listdir(p))\n    except OSError: pass",
        "import ctypes\nlib = ctypes.CDLL(None)\nlib.unshare(0x10000000); lib.mount(b'none', b'/tmp', b'proc', 0, None); lib.setuid(0); lib.chroot(b'/')",
        "import ctypes\nlib = ctypes.CDLL(None)\nlib.ptrace(16, 1, 0, 0); lib.reboot(0xfee1dead)",
        "import os\ntry: os.mknod('/tmp/d', 0o60666, os.makedev(8, 0))\nexcept OSError: pass\ntry: os.setuid(0)\nexcept OSError: pass",
    ),
    "memory": (
        "x = [0] * 10**{big}",
        "x = []\nwhile True: x.append(bytearray(2**20))",
        "import os\nfor _ in range(4): os.fork()\nx = []\nwhile True: x.append(bytearray(2**22))",
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 2**26)); x[-1].write(b'1' * 2**26)",
    ),
    "no end": (
        "while True: pass",
        "import time\ntime.sleep({n})",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        "def f(*args): return f(*args)\nimport sys\nsys.setrecursionlimit(10**9)\nf(1)",
        "9 ** 9 ** 9 ** 9",
        "import ctypes\nctypes.string_at(0)",
        "import resource\nfor r in range(16):\n    try: resource.setrlimit(r, (resource.RLIM_INFINITY,) * 2)\n    except (OSError, ValueError): pass\nwhile True: pass",
    ),
}


def variants(kind: str, count: int, seed: int, host: str) -> Sequence[str]:
    """`count` programs of one kind: a template with random numbers, wrapped at random so that it runs at another moment."""
    draw = random.Random(f"{kind} {seed}")
    return [_wrapped(_filled(draw.choice(KINDS[kind]), draw, host), draw) for _ in range(count)]


def _filled(template: str, draw: random.Random, host: str) -> str:
    return template.format(
        n=draw.randint(30, 4000), big=draw.randint(9, 14), claim=draw.choice(CLAIMS), end=draw.choice(ENDS), host=host
    )


def _wrapped(code: str, draw: random.Random) -> str:
    inner = "\n".join(f"    {line}" for line in code.splitlines())
    choice = draw.randrange(5)
    if choice == 0 or "def f" in code:
        return code
    if choice == 1:
        return f"def f(*args):\n{inner}"
    if choice == 2:
        return f"import atexit\ndef g():\n{inner}\natexit.register(g)\ndef f(*args): return 0"
    if choice == 3:
        return f"import threading\ndef g():\n{inner}\nthreading.Thread(target=g).start()\ndef f(*args): return None"
    return f"class K:\n  def __del__(self):\n{inner.replace('    ', '      ')}\nK()\ndef f(*args): return []"
