"""Whether two values are the same. Structure is compared here; single expressions by a function that is passed in."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

from async_rl.environments.verifiers.math_values import (
    Equation,
    Expression,
    Interval,
    Matrix,
    Number,
    Sequence,
    Union,
    Value,
    Words,
    read_value,
)

SameExpression: TypeAlias = Callable[[str, str], bool]
"""(gold, answer), both LaTeX of one expression or equation."""
SIGNIFICANT_DIGITS = 6
"""A decimal stands for an exact value if it is that value, rounded to so many significant digits or more."""


def same_answer(*, gold: str, answer: str, same_expression: SameExpression) -> bool:
    """Whether `answer` says what `gold` says. What cannot be read equals nothing, itself included.

    Keyword-only, because it is not symmetric: the gold answer decides how an ambiguous writing is read.
    """
    expected = read_value(gold)
    if expected is None:
        return False
    compare = _Comparison(same_expression)
    readings = [read_value(answer)]
    if isinstance(expected, Sequence | Interval):
        readings.append(read_value(answer, commas_separate=True))
    return any(reading is not None and compare.same(expected, reading) for reading in readings)


_INFINITE = re.compile(r"[-+]?\s*\\infty\s*")


class _Comparison:
    def __init__(self, same_expression: SameExpression) -> None:
        self._same_expression = same_expression

    def same(self, gold: Value, answer: Value) -> bool:
        """Whether they are equal, after unwrapping `x = 5` where one side gives the value alone."""
        if isinstance(gold, Equation) and isinstance(answer, Equation):
            return self._same_equation(gold, answer)
        if isinstance(answer, Equation):
            return bool(answer.variable or isinstance(answer.right, Number)) and self.same(gold, answer.right)
        if isinstance(gold, Equation):
            return bool(gold.variable) and self.same(gold.right, answer)
        if isinstance(gold, Interval) or isinstance(answer, Interval):
            return self._same_interval(gold, answer)
        if isinstance(gold, Sequence) or isinstance(answer, Sequence):
            return self._same_sequence(gold, answer)
        if isinstance(gold, Union) and isinstance(answer, Union):
            return self._same_in_any_order(gold.parts, answer.parts)
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return self._same_matrix(gold, answer)
        return self._same_single(gold, answer)

    def _same_single(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Number) and isinstance(answer, Number):
            return same_number(gold, answer)
        if isinstance(gold, Words) and isinstance(answer, Words):
            return gold.text == answer.text or self._same_letters(gold.text, answer.text)
        if isinstance(gold, Words | Union) or isinstance(answer, Words | Union):
            return False
        left, right = _latex(gold), _latex(answer)
        if _INFINITE.fullmatch(left) or _INFINITE.fullmatch(right):
            return left.replace(" ", "").lstrip("+") == right.replace(" ", "").lstrip("+")
        return self._same_expression(left, right)

    def _same_letters(self, gold: str, answer: str) -> bool:
        """`ab` may be a product."""
        is_short = max(len(gold), len(answer)) <= 3 and gold.isalpha() and answer.isalpha()
        return is_short and min(len(gold), len(answer)) > 1 and self._same_expression(gold, answer)

    def _same_equation(self, gold: Equation, answer: Equation) -> bool:
        if gold.variable and answer.variable:
            return gold.variable == answer.variable and self.same(gold.right, answer.right)
        return self._same_expression(gold.latex, answer.latex)

    def _same_interval(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Interval) and isinstance(answer, Interval):
            if gold.ambiguous and answer.from_relation and not answer.ambiguous:
                return False  # the gold answer may be a pair
            opens = (gold.start_open, gold.end_open) == (answer.start_open, answer.end_open)
            return opens and self.same(gold.start, answer.start) and self.same(gold.end, answer.end)
        interval, other = (gold, answer) if isinstance(gold, Interval) else (answer, gold)
        if not isinstance(interval, Interval) or not isinstance(other, Sequence) or len(other.parts) != 2:
            return False
        if interval.from_relation or not (interval.ambiguous or isinstance(gold, Interval)):
            return False
        if other.kind == "set":
            return False
        pair = Sequence((interval.start, interval.end), "tuple")
        return self._same_sequence(*((pair, other) if interval is gold else (other, pair)))

    def _same_sequence(self, gold: Value, answer: Value) -> bool:
        if not isinstance(gold, Sequence) or not isinstance(answer, Sequence):
            return False
        if len(gold.parts) != len(answer.parts):
            return False
        if "list" not in (gold.kind, answer.kind) and gold.kind != answer.kind:
            return False
        if gold.kind == "tuple":
            return all(self.same(left, right) for left, right in zip(gold.parts, answer.parts, strict=True))
        return self._same_in_any_order(gold.parts, answer.parts)

    def _same_in_any_order(self, gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        left = list(answer)
        for part in gold:
            match = next((index for index, other in enumerate(left) if self.same(part, other)), None)
            if match is None:
                return False
            del left[match]
        return not left

    def _same_matrix(self, gold: Value, answer: Value) -> bool:
        if not isinstance(gold, Matrix) or not isinstance(answer, Matrix):
            return False
        shapes = [(len(matrix.rows), len(matrix.rows[0])) for matrix in (gold, answer)]
        pairs = zip((cell for row in gold.rows for cell in row), (cell for row in answer.rows for cell in row), strict=False)
        return shapes[0] == shapes[1] and all(self.same(left, right) for left, right in pairs)


def same_number(gold: Number, answer: Number) -> bool:
    """Exact values are equal or not; a decimal may be the rounding of the other. Units differ only if both are given."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return _near(gold, answer)
    plain, percent = (answer, gold) if gold.percent else (gold, answer)
    hundredth = Number(percent.value / 100, None if percent.digits is None else percent.digits + 2)
    return _near(plain, percent) or _near(plain, hundredth)


def _near(left: Number, right: Number) -> bool:
    if left.value == right.value:
        return True
    return rounds_to(left.value, right) or rounds_to(right.value, left)


def rounds_to(value: Fraction, decimal: Number) -> bool:
    """Whether `decimal`, written with at least SIGNIFICANT_DIGITS, is `value` rounded to its digits."""
    if decimal.digits is None or decimal.value == 0:
        return False
    scaled = decimal.value * 10**decimal.digits
    if len(str(abs(int(scaled)))) < SIGNIFICANT_DIGITS:
        return False
    return bool(abs(value * 10**decimal.digits - scaled) <= Fraction(1, 2))


def _latex(value: Value) -> str:
    if isinstance(value, Expression):
        return value.latex
    assert isinstance(value, Number)
    text = f"\\frac{{{value.value.numerator}}}{{{value.value.denominator}}}"
    return text if value.digits is None else decimal_text(value)


def decimal_text(number: Number) -> str:
    """A decimal as it was written, exactly."""
    digits = number.digits or 0
    scaled = abs(int(number.value * 10**digits))
    whole, after = divmod(scaled, 10**digits)
    return f"{'-' if number.value < 0 else ''}{whole}.{after:0{digits}d}" if digits else str(int(number.value))
