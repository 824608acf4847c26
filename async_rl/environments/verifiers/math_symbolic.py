"""Comparing two expressions by algebra: math-verify's LaTeX grammar and sympy, behind a guard. Runs in a process of its own.

Model output never reaches `eval`. The grammar hands the numbers that it finds to sympy as text, which sympy's `parse_expr`
evaluates as Python: `forbid_eval` puts a function in its place that reads numerals and refuses all else.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from async_rl.environments.verifiers.math_compare import rounds_to
from async_rl.environments.verifiers.math_values import Number, read_number

_ALLOWED = re.compile(r"[A-Za-z0-9\\{}()\[\]^_+\-*/=<>!|.,:;&' ]+")
_SUSPECT = re.compile(r"__|\\(?:write|input|include|read|open|immediate|def|newcommand|let|catcode)(?![a-zA-Z])")
_INTEGER = re.compile(r"\s*[-+]?[0-9]{1,1000}\s*")
_DECIMAL = re.compile(r"\s*[-+]?(?:[0-9]{1,400}\.[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][-+]?[0-9]{1,3})?\s*")
_PRECISION = 40


class Refused(Exception):
    """Text that the guard keeps from the grammar."""


def forbid_eval() -> None:
    """From here on sympy evaluates no text in this process: it reads numerals, and refuses everything else."""
    import sympy.physics.units  # noqa: F401 - `simplify` loads it when first needed, and it names its units by evaluating text
    from latex2sympy2_extended import latex2sympy2
    from sympy.parsing import sympy_parser

    def refuse(*_: object, **__: object) -> Any:
        raise Refused("sympy was about to evaluate text")

    sympy_parser.parse_expr = _read_numeral
    sympy_parser.eval_expr = refuse
    latex2sympy2.parse_expr = _read_numeral


def _read_numeral(text: str, *_: object, **__: object) -> Any:
    from sympy import Float, Integer

    if _INTEGER.fullmatch(text):
        return Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return Float(text.strip())
    raise Refused(f"{text[:80]!r} is no numeral, and text is not evaluated")


def same_expression(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions or equations are equal. False if one cannot be read. May take forever: kill it."""
    from math_verify.errors import TimeoutException

    try:
        numbers = read_number(gold), read_number(answer)
        left, right = _parse(gold), _parse(answer)
        if left is None or right is None:
            return False
        if numbers[0] is not None and numbers[0].digits is not None:
            return _is_rounded(right, numbers[0])
        if numbers[1] is not None and numbers[1].digits is not None:
            return _is_rounded(left, numbers[1])
        return _same(left, right)
    except (Exception, TimeoutException):  # the grammar and sympy raise anything for what they cannot handle
        return False


def _parse(latex: str) -> Any:
    """The sympy expression, or None. Raises: Refused; whatever the grammar raises."""
    from latex2sympy2_extended import latex2sympy
    from math_verify.grader import should_treat_as_complex
    from sympy import I

    if not _ALLOWED.fullmatch(latex) or _SUSPECT.search(latex):
        raise Refused(f"{latex[:80]!r} holds what no formula needs")
    is_complex = should_treat_as_complex(latex)
    found = latex2sympy(latex, is_real=not is_complex, convert_degrees=False, normalization_config=None)
    if is_complex and hasattr(found, "subs"):
        found = found.subs({symbol: I for symbol in found.free_symbols if symbol.name == "i"})
    return found


def _same(gold: Any, answer: Any) -> bool:
    from math_verify import verify
    from sympy import Eq

    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _same_equation(gold, answer)
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        return False
    return bool(verify([gold], [answer], timeout_seconds=None))


def _same_equation(gold: Any, answer: Any) -> bool:
    """Equal up to a constant factor: 2x + 2y = 4 is x + y = 2, and 3x − y + 13 = 0 is not 3x + 4y + 14 = 0."""
    from sympy import simplify

    left, right = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if right == 0 or left == 0:
        return bool(left == right)
    ratio = simplify(left / right)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def _is_rounded(exact: Any, decimal: Number) -> bool:
    """Whether `decimal` is the number `exact`, rounded to the digits that it gives."""
    value = exact.doit() if hasattr(exact, "doit") else exact
    if not value.is_number or not value.is_real:
        return False
    return rounds_to(Fraction(str(value.evalf(_PRECISION))), decimal) or Fraction(str(value.evalf(_PRECISION))) == decimal.value
