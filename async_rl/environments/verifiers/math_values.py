r"""What an answer says, as a value: a number, list, set, tuple, interval, matrix, words, or an expression left as text.

Read with regular expressions and a bracket counter; nothing is evaluated. What a pattern does not cover stays an
`Expression`, whose text goes to the symbolic comparison.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

from async_rl.environments.verifiers.math_text import normalize, split_outside, without_text

_LONGEST = 1000
_MOST_PARTS = 64
_DEEPEST = 6
_MOST_BRACKETS = 50


@dataclass(frozen=True, slots=True)
class Number:
    """An exact rational as it was written. digits: after the decimal point (None: an integer or a fraction)."""

    value: Fraction
    digits: int | None = None
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Expression:
    """Text of a formula, for the symbolic comparison."""

    latex: str


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words or a letter: `Monday`, `B`."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several values. Of a tuple the order counts; a list is how people write several answers: "1, 2 and 3"."""

    parts: tuple[Value, ...]
    kind: Literal["list", "set", "tuple"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends and whether they belong to it. ambiguous: `(a, b)`, which is also how a pair is written."""

    start: Value
    end: Value
    start_open: bool
    end_open: bool
    ambiguous: bool = False
    from_relation: bool = False


@dataclass(frozen=True, slots=True)
class Union:
    """Several intervals or sets."""

    parts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """`left = right`. variable: the single letter on the left, if that is all there is."""

    left: Value
    right: Value
    latex: str
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


Value: TypeAlias = Number | Expression | Words | Sequence | Interval | Union | Equation | Matrix

_INTEGER = r"[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+"
_DECIMAL = re.compile(rf"([-+]?)\s*(?:({_INTEGER})(?:\.([0-9]*))?|\.([0-9]+))")
_SCIENTIFIC = re.compile(
    r"(.+?)\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,4})\s*\}|([-+]?[0-9]))|[eE]([-+]?[0-9]{1,3}))"
)
_FRACTION = re.compile(r"([-+]?)\s*(?:([0-9]+)\s*)?\\frac\s*\{\s*([-+]?[0-9]+)\s*\}\s*\{\s*([-+]?[0-9]+)\s*\}")
_SLASH = re.compile(r"([-+]?)\s*(?:([0-9]+)\s+)?([0-9]+)\s*/\s*([0-9]+)")
_UNIT = re.compile(r"(.*?[0-9}%])\s*([a-zA-Z][a-zA-Z./ ]*(?:\s*\^\s*\{?\s*[23]\s*\}?)?)")
_UNITS = frozenset(
    (
        *("mm", "cm", "dm", "km", "ml", "cl", "dl", "kg", "mg", "ms", "hr", "min", "ft", "yd", "mi", "lb", "oz", "mph", "kmh"),
        *("rad", "deg", "hz", "kw", "kwh", "percent", "percents", "degrees", "usd", "eur"),
    )
)
_LETTER_UNITS = frozenset(["m", "g", "s", "h", "l", "L", "N", "J", "W", "V", "K", "C", "F", "A", "m/s", "km/h"])
_WORD = re.compile(r"[A-Za-z][A-Za-z' -]+|\(?[A-Z]\)?")
_MATRIX = re.compile(r"\\begin\s*\{([bpvBV]?matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_COMMA = re.compile(r"[,;]|\b(?:and|or)\b")
_TIGHT_COMMA = re.compile(r"[;]|,\s*(?:and|or)\b|\b(?:and|or)\b|,(?![0-9]{3}(?![0-9]))|(?<![0-9]),|,(?=\s)")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_RELATION = re.compile(r"<\s*=|>\s*=|<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
_EQUALS = re.compile(r"(?<![<>!])=")
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi)|[a-zA-Z]_\{?\w\}?|[a-zA-Z]\s*\(\s*[a-zA-Z]\s*\)")
_MEMBER = re.compile(r"^\s*[a-zA-Z]\s*\\in(?![a-zA-Z])")
_BOXED = re.compile(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*", re.DOTALL)
_INFINITY = re.compile(r"[-+]?\s*\\infty")
_PLAIN = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<!\\)\bsqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<!\\)\bpi\b"), r"\\pi "),
    (re.compile(r"\*"), r"\\cdot "),
)


def read_value(text: str, *, commas_separate: bool = False) -> Value | None:
    """The value that `text` writes, or None: nothing, too long, or brackets that do not close or nest too deep.

    commas_separate: "1,234" is two numbers and not one.
    """
    if len(text) > _LONGEST:
        return None
    text = normalize(_unboxed(text))
    if not text or not _is_balanced(text):
        return None
    return _read(text, commas_separate, _DEEPEST)


def _unboxed(text: str) -> str:
    while match := _BOXED.fullmatch(text):
        text = match[1]
    return text


def _read(text: str, commas_separate: bool, depth: int) -> Value | None:
    text = text.strip()
    if not text or depth == 0:
        return None
    for read in (_matrix, _union, _bracketed, _listed, _related, _equated):
        value = read(text, commas_separate, depth - 1)
        if value is not None:
            return value
    return read_number(text) or _words(text) or _expression(text)


# -- numbers ---------------------------------------------------------------------------------------------------------
def read_number(text: str) -> Number | None:
    """An integer, decimal, fraction or mixed number, with percent sign or unit; None for everything else."""
    formula, unit = without_text(text)
    percent = False
    if re.fullmatch(r".*%", formula) or unit in {"percent", "percents"}:
        percent, formula, unit = True, formula.rstrip("% ").rstrip(), ""
    number = _plain_number(formula)
    if number is None and (match := _UNIT.fullmatch(formula)) and _is_unit(match[2], spaced=match[0][match.end(1)] == " "):
        number, unit = _plain_number(match[1].rstrip("%").rstrip()), f"{match[2]} {unit}".strip().lower()
        percent = percent or match[1].endswith("%")
        if unit in {"percent", "percents"}:
            percent, unit = True, ""
    if number is None:
        return None
    return Number(number.value, number.digits, percent, _unit(unit))


def _is_unit(text: str, *, spaced: bool) -> bool:
    """`5 m` and `12 apples`, but not `5x`, `2ab` or `5m`."""
    bare = re.sub(r"\s*\^.*", "", text).strip()
    return bare.lower() in _UNITS or (spaced and (bare in _LETTER_UNITS or (len(bare) > 2 and bare.isalpha()) or " " in bare))


def _plain_number(text: str) -> Number | None:
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    if match := _DECIMAL.fullmatch(text):
        sign, whole, after, only = match.groups()
        digits = only if only is not None else after
        value = Fraction(f"{(whole or '0').replace(',', '')}.{digits or 0}")
        return Number(-value if sign == "-" else value, len(digits) if digits else None)
    for pattern in (_FRACTION, _SLASH):
        if match := pattern.fullmatch(text):
            return _fraction(*match.groups())
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa = _DECIMAL.fullmatch(match[1].strip())
        exponent = int(next(group for group in match.groups()[1:] if group is not None))
        base = _plain_number(match[1]) if mantissa and abs(exponent) <= 400 else None
        if base is not None:
            digits = None if base.digits is None else max(0, base.digits - exponent) or None
            return Number(base.value * Fraction(10) ** exponent, digits)
    return None


def _fraction(sign: str, whole: str | None, above: str, below: str) -> Number | None:
    if int(below) == 0:
        return None
    value = Fraction(int(above), int(below)) + int(whole or 0)
    return Number(-value if sign == "-" else value)


def _unit(text: str) -> str:
    """Equal units in equal letters: no plural s, no spaces, no braces."""
    return re.sub(r"(?<=[a-z]{2})s\b", "", re.sub(r"[{}^]", "", text)).replace(" ", "")


# -- structures ------------------------------------------------------------------------------------------------------
def _matrix(text: str, commas_separate: bool, depth: int) -> Value | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in re.split(r"\\\\", match[2]) if line.strip()]
    rows = [[_read(cell, False, depth) for cell in line.split("&")] for line in lines]
    if not rows or len({len(row) for row in rows}) != 1 or any(cell is None for row in rows for cell in row):
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def _union(text: str, commas_separate: bool, depth: int) -> Value | None:
    parts = split_outside(text, _CUP)
    values = _read_all(parts, commas_separate, depth) if len(parts) > 1 else None
    return None if values is None else Union(values)


def _bracketed(text: str, commas_separate: bool, depth: int) -> Value | None:
    text = _MEMBER.sub("", text).strip()
    if text.startswith("\\{") and text.endswith("\\}"):
        return _sequence(text[2:-2], depth, "set")
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or _closes_at(text) != len(text) - 1:
        return None
    parts = split_outside(text[1:-1], re.compile(r"[,;]"))
    if len(parts) == 1:
        return _read(parts[0], commas_separate, depth) if (text[0], text[-1]) == ("(", ")") else None
    if len(parts) == 2 and (_is_interval(text, parts) or (text[0], text[-1]) == ("(", ")")):
        start, end = (_read(part, True, depth) for part in parts)
        if start is None or end is None:
            return None
        ambiguous = not _is_interval(text, parts)
        return Interval(start, end, text[0] == "(", text[-1] == ")", ambiguous)
    return _sequence(text[1:-1], depth, "tuple")


def _is_interval(text: str, parts: list[str]) -> bool:
    """A square bracket, or an infinite end: no pair is written so. `[a, b]` may be a list too; it compares the same."""
    return text[0] == "[" or text[-1] == "]" or any(_INFINITY.fullmatch(part) for part in parts)


def _listed(text: str, commas_separate: bool, depth: int) -> Value | None:
    if "\\pm" in text and text.count("\\pm") == 1:
        return _list([text.replace("\\pm", "+"), text.replace("\\pm", "-")], depth)
    pattern = _COMMA if commas_separate else _TIGHT_COMMA
    parts = [part for part in split_outside(text, pattern) if part]
    if len(parts) < 2:
        return None
    heads = [_assigned(part) for part in parts]
    if heads[0] and not any(heads[1:]):
        parts[0] = _EQUALS.split(parts[0], maxsplit=1)[1]
    return _list(parts, depth)


def _sequence(text: str, depth: int, kind: Literal["set", "tuple"]) -> Value | None:
    parts = [part for part in split_outside(text, re.compile(r"[,;]")) if part]
    values = _read_all(parts, True, depth)
    return None if values is None else Sequence(values, kind)


def _list(parts: list[str], depth: int) -> Value | None:
    values = _read_all(parts, False, depth)
    return None if values is None else Sequence(values, "list")


def _read_all(parts: list[str], commas_separate: bool, depth: int) -> tuple[Value, ...] | None:
    """The values of all parts, or None if one cannot be read or there are too many."""
    values = [_read(part, commas_separate, depth) for part in parts[: _MOST_PARTS + 1]]
    whole = tuple(value for value in values if value is not None)
    return whole if len(whole) == len(values) <= _MOST_PARTS else None


def _related(text: str, commas_separate: bool, depth: int) -> Value | None:
    r"""`a < x \le b`, and `x > a`, as intervals of their variable."""
    signs = [_sign(match[0]) for match in _RELATION.finditer(text)]
    parts = split_outside(text, _RELATION)
    if len(parts) == 2 and len(signs) == 1:
        return _ray(parts, signs[0], depth)
    if len(parts) != 3 or len(signs) != 2 or not _VARIABLE.fullmatch(parts[1]) or signs[0][0] != signs[1][0]:
        return None
    ends, opens = [parts[0], parts[2]], [len(sign) == 1 for sign in signs]
    if signs[0][0] == ">":
        ends.reverse()
        opens.reverse()
    start, end = (_read(part, False, depth) for part in ends)
    return None if start is None or end is None else Interval(start, end, opens[0], opens[1], from_relation=True)


def _ray(parts: list[str], sign: str, depth: int) -> Value | None:
    left, right = parts
    if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
        left, right, sign = right, left, {"<": ">", ">": "<"}[sign[0]] + sign[1:]
    bound = _read(right, False, depth) if _VARIABLE.fullmatch(left) else None
    if bound is None:
        return None
    is_open, infinity = len(sign) == 1, Expression(r"\infty")
    if sign[0] == "<":
        return Interval(Expression(r"-\infty"), bound, True, is_open, from_relation=True)
    return Interval(bound, infinity, is_open, True, from_relation=True)


def _sign(text: str) -> str:
    return {"\\le": "<=", "\\ge": ">="}.get(text, text.replace(" ", ""))


def _equated(text: str, commas_separate: bool, depth: int) -> Value | None:
    parts = split_outside(text, _EQUALS)
    if len(parts) < 2 or not all(parts):
        return None
    left, right = _read(parts[0], False, depth), _read(parts[-1], commas_separate, depth)
    if left is None or right is None:
        return None
    variable = parts[0] if _VARIABLE.fullmatch(parts[0]) else ""
    return Equation(left, right, f"{parts[0]}={parts[-1]}", variable)


def _assigned(part: str) -> bool:
    return bool(_VARIABLE.fullmatch(_EQUALS.split(part, maxsplit=1)[0].strip())) and "=" in part


def _words(text: str) -> Words | None:
    formula, words = without_text(text)
    if not formula and words:
        return Words(words.strip("() "))
    return Words(text.strip("() ").lower()) if _WORD.fullmatch(text) and "\\" not in text else None


def _expression(text: str) -> Expression | None:
    formula, _ = without_text(text)
    for pattern, plain in _PLAIN:
        formula = pattern.sub(plain, formula)
    return Expression(re.sub(r"\s+", " ", formula).strip()) if formula else None


# -- brackets --------------------------------------------------------------------------------------------------------
def _closes_at(text: str) -> int:
    """Index of the bracket that closes the first one; round and square ones close each other (`[0, 1)`)."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return index
    return -1


def _is_balanced(text: str) -> bool:
    depth, braces = 0, 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        braces += (character == "{") - (character == "}")
        if depth < 0 or braces < 0 or depth > _MOST_BRACKETS:
            return False
    return depth == 0 and braces == 0
