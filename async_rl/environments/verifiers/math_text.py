r"""LaTeX as people write it, brought to one form: `\dfrac12`, `9{,}500`, `$5`, `\left(`, `×`, `12 cm`. String to string."""

from __future__ import annotations

import re

_REMOVED = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])"
    r"|\\[!,;:]|\\(?:quad|qquad)(?![a-zA-Z])|\\(?:hspace|vspace)\s*\{[^{}]*\}|\\[()\[\]](?=$|\s)|\$"
)
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm ", "∅": r"\emptyset ",
    "°": r"^\circ ", "′": "'", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3",
    "\u00a0": " ", "\u202f": " ", "~": " ", r"\ ": " ", r"\%": "%", r"\$": "", r"\&": "&", r"\#": "#", r"\_": "_",
}  # fmt: skip
_ALIASES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge",
    "neq": "ne", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "mathrm": "text",
    "mbox": "text", "textbf": "text", "textit": "text", "mathbf": "text", "textrm": "text", "mathit": "text",
    "operatorname": "text", "lt": "<", "gt": ">",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)|\\frac\s*(\d)\s*(\{)|\\frac\s*(\{[^{}]*\})\s*(\d)(?!\d)")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\w)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}(\s*\^\s*\{?\s*[23]\s*\}?)?")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![a-zA-Z])|\\circ(?![a-zA-Z])")
_CURRENCY = re.compile(r"(?<![\w])[€£¥₹](?=\s*[\d.])|(?<=\d)\s*[€£¥₹]")
_SPACES = re.compile(r"\s+")


def normalize(text: str) -> str:
    r"""One form for equal writings. `\text{…}` stays as `\text{…}` with its words; thousands groups `9{,}500` are joined."""
    text = text.replace("\\\\", "\x01")  # the end of a matrix row, which is no backslash before something
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = text.replace(r"{,}", "\x00").replace(r"\,", " ")
    text = _COMMAND.sub(_alias, text)
    text = _REMOVED.sub(" ", text)
    text = re.sub(r"(?<=\d)\x00(?=\d{3}(?!\d))", "", text).replace("\x00", ",")
    text = _DEGREES.sub(" ", text)
    text = _CURRENCY.sub("", text)
    text = _SHORT_FRACTION.sub(_spelled_fraction, text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\\text\s*\{\s*(and|or)\s*\}", r" \1 ", text)
    return _SPACES.sub(" ", text.replace("\x01", "\\\\")).strip().rstrip(".").strip()


def without_text(text: str) -> tuple[str, str]:
    r"""(formula, words): `5\text{ cm}` is `5` and `cm`. Words are lower case."""
    words = " ".join(f"{word.strip()}{power.strip()}" for word, power in _TEXT.findall(text))
    return _SPACES.sub(" ", _TEXT.sub(" ", text)).strip(), _SPACES.sub(" ", words).strip().lower()


def split_outside(text: str, pattern: re.Pattern[str]) -> list[str]:
    """`text` cut at what `pattern` matches outside of all brackets; stripped. Brackets that do not fit split nothing."""
    parts: list[str] = []
    begin = position = depth = 0
    while position < len(text):
        match = pattern.match(text, position) if depth == 0 else None
        if match and match.end() > position:
            parts.append(text[begin : match.start()].strip())
            begin = position = match.end()
            continue
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            character = text[position + 1] if text[position + 1] in "{}" else ""
            position += 1 if character else 0
        depth = max(0, depth + (character in tuple("([{")) - (character in tuple(")]}")))
        position += 1
    return [*parts, text[begin:].strip()]


def _alias(match: re.Match[str]) -> str:
    name = _ALIASES.get(match[1])
    if name is None:
        return match[0]
    if name in "<>":
        return f" {name} "
    return f"\\{name}"


def _spelled_fraction(match: re.Match[str]) -> str:
    two_digits, digit_brace, brace_digit = match.group(1, 2), match.group(3, 4), match.group(5, 6)
    if two_digits[0]:
        return f"\\frac{{{two_digits[0]}}}{{{two_digits[1]}}}"
    if digit_brace[0]:
        return f"\\frac{{{digit_brace[0]}}}{{"
    return f"\\frac{brace_digit[0]}{{{brace_digit[1]}}}"
