r"""Finding the answer in a completion. Text only: nothing is parsed or evaluated here.

Strict: what is in the last `\boxed{…}`, or nothing. Lenient: else what follows a marker ("Final answer:", "####"), else the
last number or the last formula between dollars.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"(?:[\s$.,;&]|\\[\[\]();,!]|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
_MARKER = re.compile(r"(?:\bfinal answer|\banswer)\b\**\s*(?:(?:is|=)\s*:?|:)\**\s*|####\s*", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*%)?(?!\w)|(?<![\w])[-+]?\.\d+"
)
_SENTENCE_END = re.compile(r"(?<!\d)\.(?:\s|$)|\.\s|[!?](?:\s|$)|\n")
_LONGEST_ANSWER = 2000


def find_answer(text: str, *, strict: bool) -> str | None:
    """The answer that `text` gives, or None if it gives none (also: a last box that is never closed)."""
    if _BOX.search(text):
        return boxed(text)
    if strict:
        return None
    for candidate in (_after_marker(text), _last_formula(text), _last_number(text)):
        if candidate is not None and candidate.strip():
            return candidate.strip()[:_LONGEST_ANSWER]
    return None


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`; boxes with nothing but "and", "or" or punctuation between them are one answer.

    None if there is no box, or the last one is never closed: a truncated answer is none.
    """
    starts = [match.start() for match in _BOX.finditer(text)]
    spans = _outermost([(start, *_box_content(text, start)) for start in starts])
    if not spans or spans[-1][2] < 0:
        return None
    parts = [spans[-1]]
    for span in reversed(spans[:-1]):
        between = text[span[2] + 1 : parts[0][0]]
        if span[2] < 0 or not _BETWEEN_BOXES.fullmatch(between):
            break
        parts.insert(0, span)
    return ", ".join(text[begin:end] for _, begin, end in parts)[:_LONGEST_ANSWER]


def _box_content(text: str, start: int) -> tuple[int, int]:
    """Begin and end of what the box at `start` holds; the end is −1 if it is never closed."""
    begin = text.index("{", start) + 1
    depth, position = 1, begin
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return begin, position
        position += 1
    return begin, -1


def _outermost(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    kept: list[tuple[int, int, int]] = []
    for span in spans:
        if kept and kept[-1][2] >= 0 and span[0] < kept[-1][2]:
            continue
        kept.append(span)
    return kept


def _after_marker(text: str) -> str | None:
    """What follows the last marker: a formula, a number with its unit, or the rest of the sentence."""
    matches = list(_MARKER.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].lstrip(" *_:")
    formula = _FORMULA.match(rest)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    end = _SENTENCE_END.search(rest)
    return rest[: end.start() if end else len(rest)].strip(" *_`.")


def _last_formula(text: str) -> str | None:
    formulas = [next(group for group in match.groups() if group is not None) for match in _FORMULA.finditer(text)]
    return formulas[-1] if formulas else None


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None
