"""What runs inside the sandbox, given to `python -I -S -c` as text: only the standard library, and nothing of ours.

Descriptor 3 is the control socket: frames of JSON behind their length. Modes: "program" runs the code as a script that reads
`input` and prints; "serve" defines the code's functions and answers calls; "test" runs test code whose calls
of the solution's functions go out through the socket, so that solution and tests never share a process.
"""

from __future__ import annotations

import builtins
import json
import os
import socket
import struct
import sys

LENGTH = struct.Struct("<I")
LONGEST = 2**20


class Control:
    def __init__(self):
        self.socket = socket.socket(fileno=3)

    def send(self, value):
        body = json.dumps(value).encode()
        if len(body) > LONGEST:
            body = json.dumps({"error": "ValueError: the result is too large"}).encode()
        self.socket.sendall(LENGTH.pack(len(body)) + body)

    def read(self):
        (length,) = LENGTH.unpack(self.exactly(LENGTH.size))
        return json.loads(self.exactly(length))

    def exactly(self, count):
        parts = b""
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return parts


def pack(value):
    """Plain data as JSON with tags. Raises: TypeError for everything else."""
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if type(value) is int:
        return value if abs(value) < 2**53 else {"t": "int", "v": hex(value)}
    if type(value) is list:
        return [pack(item) for item in value]
    if type(value) in (tuple, set, frozenset):
        return {"t": type(value).__name__, "v": [pack(item) for item in value]}
    if type(value) is dict or type(value).__mro__[1:2] == (dict,):
        return {"t": "dict", "v": [[pack(key), pack(item)] for key, item in value.items()]}
    if type(value) is bytes:
        return {"t": "bytes", "v": value.hex()}
    if type(value) is complex:
        return {"t": "complex", "v": [value.real, value.imag]}
    raise TypeError("a " + type(value).__name__ + " cannot leave the sandbox; return plain data")


def unpack(value):
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, inner = value["t"], value["v"]
    if tag == "int":
        return int(inner, 16)
    if tag == "bytes":
        return bytes.fromhex(inner)
    if tag == "complex":
        return complex(*inner)
    if tag == "dict":
        return {unpack(key): unpack(item) for key, item in inner}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](unpack(item) for item in inner)


def describe(error):
    return (type(error).__name__ + ": " + str(error))[:500]


def define(code, name):
    namespace = {"__name__": name, "__builtins__": builtins}
    exec(compile(code, "<" + name + ">", "exec"), namespace)
    return namespace


def serve(control, order):
    namespace = define(order["code"], "solution")
    functions = sorted(name for name, value in namespace.items() if callable(value) and name[:1] != "_")
    control.send({"defined": functions})
    while True:
        call = control.read()
        try:
            function = namespace[call["call"]]
            arguments = unpack(call["args"])
            control.send({"value": pack(function(*arguments, **unpack(call.get("kwargs") or {"t": "dict", "v": []})))})
        except BaseException as error:
            control.send({"error": describe(error), "memory": isinstance(error, MemoryError)})


class CandidateError(Exception):
    """The solution raised, or gave what is no plain data."""


def test(control, order):
    def proxy(name):
        def call(*args, **kwargs):
            control.send({"call": name, "args": pack(list(args)), "kwargs": pack(kwargs)})
            answer = control.read()
            if "error" in answer:
                kind, _, text = answer["error"].partition(": ")
                known = getattr(builtins, kind, None)
                is_error = isinstance(known, type) and issubclass(known, Exception)
                raise (known if is_error else CandidateError)(text)
            return unpack(answer["value"])

        call.__name__ = name
        return call

    namespace = {"__name__": "tests", "__builtins__": builtins}
    namespace.update({name: proxy(name) for name in order["functions"]})
    try:
        exec(compile(order["code"], "<tests>", "exec"), namespace)
        if callable(namespace.get("check")) and order["entry_point"]:
            namespace["check"](proxy(order["entry_point"]))
    except BaseException as error:
        control.send({"finished": False, "why": describe(error)})
    else:
        control.send({"finished": True})


def program(control, order):
    control.socket.close()
    text = os.memfd_create("input")
    os.write(text, order["input"].encode())
    os.lseek(text, 0, os.SEEK_SET)
    os.dup2(text, 0)
    os.close(text)
    sys.argv = ["solution.py"]
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if name[:2] != "__"]:
        del namespace[name]
    exec(compile(order["code"], "<solution>", "exec"), namespace)


def main():
    control = Control()
    control.send({"ready": True})
    order = control.read()
    sys.setrecursionlimit(order["recursion"])
    if order["mode"] == "program":
        program(control, order)
        return
    try:
        {"serve": serve, "test": test}[order["mode"]](control, order)
    except BaseException as error:
        control.send({"failed": describe(error), "memory": isinstance(error, MemoryError)})


main()
