"""One checking process: `python -m async_rl.environments.verifiers.check_child FD`. One kind of check, one at a time.

It loads what the check needs once, and forks a process for each: that is what a deadline kills.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from async_rl.environments.process_child import ParentConnection, end_with_parent
from protocol.packing import pack, unpack

_MEMORY_BYTES = 4 * 2**30
_LONGEST_ERROR = 500

Fields: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[[Fields], bool]


def load_math() -> Check:
    """{gold, answer}: the same mathematical answer."""
    from async_rl.environments.verifiers.math_compare import same_answer
    from async_rl.environments.verifiers.math_symbolic import forbid_eval, same_expression

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit of its own: we do
    same_expression("x", "x + 0")  # loads the grammar and sympy
    forbid_eval()
    return lambda fields: same_answer(gold=fields["gold"], answer=fields["answer"], same_expression=same_expression)


def load_regex() -> Check:
    """{pattern, text, whole, flags}: the pattern matches."""

    def check(fields: Fields) -> bool:
        pattern = re.compile(fields["pattern"], re.DOTALL | (re.IGNORECASE if fields["ignore_case"] else 0))
        find = pattern.fullmatch if fields["whole"] else pattern.search
        return find(fields["text"]) is not None

    return check


def load_json() -> Check:
    """{text, schema?, gold?}: text is JSON, fits the schema and equals gold."""
    from jsonschema import Draft202012Validator

    def check(fields: Fields) -> bool:
        try:
            value = json.loads(fields["text"], parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError):
            return False
        if "schema" in fields and not Draft202012Validator(fields["schema"]).is_valid(value):
            return False
        return "gold" not in fields or _equal(value, fields["gold"])

    return check


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _equal(left: Any, right: Any) -> bool:
    """As JSON: true is not 1, and 1.0 is 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


CHECKS: Mapping[str, Callable[[], Check]] = {"math": load_math, "regex": load_regex, "json": load_json}


def main() -> None:
    parent = ParentConnection()
    start = unpack(parent.read())
    kind, timeout_s = start["kind"], float(start["timeout_s"])
    try:
        check = CHECKS[kind]()
    except ImportError as error:
        parent.send(pack({"error": f"the verifier {kind} needs {error.name}: pip install 'async-rl[verifiers]'"}))
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    parent.send(pack({"error": None}))
    while True:
        parent.send(_forked(check, unpack(parent.read()), timeout_s))


def _forked(check: Check, fields: Fields, timeout_s: float) -> bytes:
    """The verdict of a process that exists for one check, so that one that hangs costs no loading of libraries."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        end_with_parent()
        os.write(write, pack(_answer(check, fields)))
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], timeout_s)
    verdict = os.read(read, select.PIPE_BUF) if ready else b""
    os.close(read)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if verdict:
        return verdict
    if not ready:
        return pack({"error": f"no verdict within timeout_s={timeout_s:g}; its process was killed", "type": "timeout"})
    return pack({"error": f"the checking process died: {os.waitstatus_to_exitcode(status)}", "type": "crash"})


def _answer(check: Check, fields: Fields) -> dict[str, object]:
    try:
        return {"right": check(fields)}
    except Exception as error:  # a bad pattern or schema, no memory: nothing was found out about the answer
        return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR], "type": type(error).__name__}


if __name__ == "__main__":
    main()
