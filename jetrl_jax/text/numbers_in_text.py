r"""Reads a number in a text as a whole, or not at all: never the leading part of a longer expression.

A number is an optional sign, currency and digits, thousands grouped by threes (``1,000``, ``1{,}000``,
``1,\!000``, ``1\,000``, thin and no-break spaces), with a decimal point.  A unit may follow: ``18 dollars``,
``18km``, ``18\text{ cm}^2``, ``18\%``, ``90^\circ``.  With other mathematics before or after its digits, a
text is not a number: ``2k``, ``2\pi``, ``2^{16}``, ``2516_8``, ``3\sqrt{13}``, ``4 1/2``, ``3, 5, 7``,
``2 million``, ``1e3``.  Nothing is computed, so ``1/2`` is not a number either.

    whole_number   the text is only a number: an answer, or the content of ``\boxed{...}``
    read_number    the text begins with a number, and prose may follow: ``18 because ...``, ``18!``
    hash_number    `read_number` after the last ``####``
    boxed_number   `whole_number` of the last ``\boxed{...}``, with balanced braces; None if it is not closed
    last_number    the last number of a text; ``+``, ``-`` and ``=`` before it are operators; None after an
                   operator that binds closer (``^``, ``/``, ``*``, ``\sqrt{``)

A number is a `Decimal` made from its digits and never rounded, as no operation here uses a decimal context.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_GROUP = "[,\u00a0\u2009\u202f]"  # comma and typographic spaces between thousands
_DIGITS = (
    rf"(?:[1-9][0-9]{{0,2}}(?P<group>{_GROUP})[0-9]{{3}}(?:(?P=group)[0-9]{{3}})*(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|\.[0-9]+"
)
_MINUS = "-\u2212\u2013"
_MONEY = "$€£¥"
_BLANK = "[ \u2009]?"
_SIGN = rf"([{_MINUS}+]?){_BLANK}"
_NUMBER = re.compile(
    rf"{_SIGN}(?:\\?[{_MONEY}]){{0,2}}{_BLANK}{_SIGN}(?:\\?[{_MONEY}])?(?P<digits>{_DIGITS})"
)
_RUN = re.compile(r"(?:(?<![0-9A-Za-z])\.)?[0-9](?:[0-9]|[.,'’\u00a0\u2009\u202f](?=[0-9]))*")
_HASHES = re.compile(
    rf"(?<!#)#{{4,}}+[ \t]*+(?:\*\*|__|`|\\\(|\\\[)*[ ]?(?=[{_MINUS}+{_MONEY}\\.0-9(√∛=≈~]|[A-Za-z][ ]?[=≈])"
)

# TeX: spaces, and commands whose argument is shown unchanged.
_TEXT_COMMANDS = (
    "(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox)"
)
_THIN = re.compile(r"\\(?:[,;:> ]|(?:thin|med|thick)space(?![A-Za-z]) ?)")
_NOTHING = re.compile(r"\\(?:[!/]|(?:negthinspace|displaystyle|left|right)(?![A-Za-z]) ?)")
_WIDE = re.compile(r"\\q?quad(?![A-Za-z])")
_TEXT = re.compile(rf"\\{_TEXT_COMMANDS}\s*\{{((?:[^{{}}\\]|\\[$%&#])*)\}}")
_GROUPED = re.compile(rf"(?<![A-Za-z}}\]^_])\{{((?:[{_MINUS}+0-9., \u00a0\u2009\u202f]|\\?[{_MONEY}])*)\}}")
_BRACES = re.compile(r"(\\{1,2}boxed\s*\{)|\\.|[{}]", re.DOTALL)
_WRAPPER = re.compile(rf"(?:\\(?:{_TEXT_COMMANDS}|boxed|fbox))?\s*\{{")
_OPEN, _CLOSE = "\ue000", "\ue001"  # mark the words of a text command
_UNSEEN = re.compile("[\u200b-\u200f\u2060\ufeff\ue000\ue001]")
_WRAPS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), (_OPEN, _CLOSE))
_MAX_WRAPS = 16
_MAX_UNIT_WORDS = 6

# Words that may follow: units, and any longer word that is not mathematical.
_UNITS = frozenset(
    "km cm mm nm mi ft in yd kg mg lb lbs oz ml mL dl cl hr hrs min mins sec secs ms mph kph kmh rpm "
    "hp kw kW kWh Hz kHz MHz GHz Pa "
    "kPa mol cal kcal deg rad st nd rd th am pm AM PM USD EUR GBP GB MB KB TB pts sq cu of".split()
)
_LETTER_UNITS = frozenset("mglLshWVJCF")
_FUNCTIONS = frozenset(
    "sin cos tan cot csc log ln exp lcm gcd root det lim arcsin arccos arctan sinh cosh tanh arg".split()
)
_VALUES = frozenset(  # words that are part of a number
    "pi sqrt mod modulo choose squared cubed factorial alpha beta gamma delta epsilon theta lambda mu "
    "sigma phi omega tau iota kappa rho "
    "psi infinity infty inf nan hundred hundreds thousand thousands million millions billion billions "
    "trillion trillions dozen dozens bn "
    "mil mln mio lakh lakhs crore crores half halves thirds fourths fifths sixths sevenths eighths "
    "ninths tenths hundredths thousandths "
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty "
    "thirty forty fifty sixty seventy eighty ninety".split()
)
_CONNECTIVES = frozenset("plus minus times over divided multiplied and or to by through point".split())
_COMPOUND = re.compile(  # 5 feet 6 inches
    r"(?:feet|foot|ft|hours?|hrs?|minutes?|mins?|dollars?|pounds?|lbs?|weeks?|days?|years?|months?|yards?|meters?|metres?|miles?|"
    r"degrees?|euros?|gallons?|cups?),?\s+(?:and\s+)?[$€£]?[0-9]"
)
_CONNECTED = re.compile(
    r"(?:plus|minus|times|over|divided by|multiplied by|by|and|or|to|through|point|(?:(?:per "
    r"?cent|pct)\s+)?of)\s+"
    rf"(?:[{_MINUS}+]?(?:\\?[{_MONEY}])?[0-9.]|(?:a |one )?(?:half|third|quarter)|\\)|to the "
)
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_UNIT_SIGN = re.compile(
    rf"\s?(?:\\?%|\\?[{_MONEY}](?![0-9])|\^?\s*°[CF]?(?![A-Za-z])|\^\s*(?:\\circ(?![A-Za-z])|\{{\s*(?:\\circ|°)\s*\}})|\\degree(?![A-Za-z]))"
)
_POWER = re.compile(r"\^\s*(?:[23](?![0-9])|\{\s*[23]\s*\})")
_GAP = re.compile(r"[\s/·]+|\\cdot(?![A-Za-z])")

# Prose: marks that close the surroundings of a number, and operators with an operand.
_CLOSERS = re.compile(
    rf"(?:\s*\}}|\s*\\\)|\s*\\\]|\*\*(?![\w(\\])|__(?!\w)|`|\)|\]|[\"”»]|['’](?:s(?![A-Za-z])|(?!\w))|\$(?![0-9])|[!?]|{_CLOSE})+"
)
_OPERATORS = "-−–—+*/=^<>≤≥≠≈±×÷·⋅∗•∙⁄:~|&_→⇒←↔"
_TAG = re.compile(r"<[A-Za-z/|!]")
_VARIABLE = r"(?!(?:a|A|I)\s+[^\W\d_]{2})[A-Za-z](?![^\W\d_]|['’])"
_OPERAND = rf"(?:[0-9({{\[\\√{_MONEY}]|\.[0-9]|{_VARIABLE})"
_OPERATION = re.compile(rf"[{re.escape(_OPERATORS)}\s]+{_OPERAND}")
_OPERATION_ON_DIGITS = re.compile(rf"\s*[{re.escape(_OPERATORS)}]+\s*[{_MONEY}(]*\.?[0-9]")
_ARGUMENT = re.compile(rf"\s*{_OPERAND}")
_LISTED = re.compile(rf"\s*[{_MINUS}+]?\s*(?:\\?[{_MONEY}])?\s*(?:\.?[0-9]|\\|…|\.\.|{_VARIABLE})")
_MIXED = re.compile(r"[0-9]+\s*(?:[/⁄]|\\over)\s*[0-9]")
_THREE_DIGITS = re.compile(r"[0-9]{3}(?![0-9])")

# Before a last number: operators that bind closer than + and -, comparisons, functions, and the rest of a
# longer number.
_BINDS = re.compile(
    r"(?:(?:[\^/÷×·⋅∗√∛<≤≥≠⁄±]|[\w)\]}]\s*\*+|[0-9]\s+:|[0-9]_|\s>|\\[A-Za-z]+_(?:\w|\{[^{}]*\})|\\sqrt\[[^\]]*\]|[0-9)]\s*(?:times|over|by|x)|"
    r"(?<![A-Za-z])(?:minus|negative|sqrt|root|log|ln|exp|sin|cos|tan)|"
    r"\\(?!(?:approx|implies|Rightarrow|rightarrow|longrightarrow|to|therefore|item|cdots|boxed)(?![A-Za-z]))[A-Za-z]+)\s*|"
    r"[)\]}]|[0-9]:|[0-9]['’]|[A-Za-z]\.|\.\.|[A-Za-z]\(|(?<![A-Za-z])[A-Za-z])$"
)
_ARGUMENT_OPENS = re.compile(rf"(?:[\^_\]}}]|\\(?!(?:{_TEXT_COMMANDS}|boxed|fbox)(?![A-Za-z]))[A-Za-z]+)\s*$")
_UNIT_BEFORE_POWER = re.compile(rf"(?:[A-Za-z]{{2}}|{_CLOSE})\s*\^\s*(?:\{{\s*)?$")
_WINDOW = 64  # number of characters examined before a number


def read_number(text: str) -> Decimal | None:
    """The number at the start of ``text`` if only prose or nothing follows it, else None."""
    text = _plain(text).lstrip()
    match = _NUMBER.match(text)
    if match is None or not _prose_may_follow(match["digits"], text[match.end() :]):
        return None
    return _value(match)


def whole_number(text: str) -> Decimal | None:
    """The number if ``text`` is one, with at most a unit after it; else None."""
    unwrapped = _unwrap(_plain(text))
    match = None if unwrapped is None else _NUMBER.match(unwrapped)
    if unwrapped is None or match is None or not _is_unit(unwrapped[match.end() :]):
        return None
    return _value(match)


def hash_line(text: str) -> str | None:
    """The rest of the line after the last ``####`` that does not begin a heading, or None."""
    found = list(_HASHES.finditer(text))
    return text[found[-1].end() :].partition("\n")[0] if found else None


def hash_number(text: str) -> Decimal | None:
    """The number after the last ``####``, or None; a heading such as ``#### Note`` is skipped."""
    line = hash_line(text)
    if line is None:
        return None
    return boxed_number(line) if re.match(r"\\{1,2}boxed(?![A-Za-z])", line) else read_number(line)


def boxed_number(text: str) -> Decimal | None:
    r"""The number in the last ``\boxed{...}``, or None."""
    content = boxed_content(text)
    return None if content is None else whole_number(content)


def boxed_content(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, the outermost of nested ones; None if none is closed."""
    stack: list[int] = []  # for each open brace, the box that it opens, or -1
    boxes: list[list[int]] = []  # start, end (-1 while open), the enclosing box (-1 without one)
    around = -1
    for match in _BRACES.finditer(text):
        if match[1]:
            boxes.append([match.end(), -1, around])
            around = len(boxes) - 1
            stack.append(around)
        elif match[0] == "{":
            stack.append(-1)
        elif match[0] == "}" and stack:
            box = stack.pop()
            if box >= 0:
                boxes[box][1] = match.start()
                around = boxes[box][2]
    if not boxes or boxes[-1][1] < 0:
        return None
    start, end, parent = boxes[-1]
    while parent >= 0 and boxes[parent][1] >= 0:
        start, end, parent = boxes[parent]
    return text[start:end]


def last_number(text: str) -> Decimal | None:
    """The last number of a text, or None; in ``16-3`` the minus is an operator."""
    text = _plain(text)
    runs = list(_RUN.finditer(text))
    while (
        runs
        and runs[-1][0] in ("2", "3")
        and _UNIT_BEFORE_POWER.search(text, max(0, runs[-1].start() - _WINDOW), runs[-1].start())
    ):
        runs.pop()  # cm^2
    if not runs or re.fullmatch(_DIGITS, runs[-1][0]) is None:
        return None
    start, end = runs[-1].span()
    sign, before = _sign_before(text[max(0, start - _WINDOW) : start])
    rest = text[end:].partition("\n")[0]
    for mark in ("**", "__", "*"):  # emphasis
        if (
            before.endswith(mark)
            and rest.startswith(mark)
            and not re.search(rf"\w{re.escape(mark)}$", before)
        ):
            before, rest = before.removesuffix(mark), rest.removeprefix(mark)
    grouped = len(runs[-1][0]) == 3 and re.search(r"(?<![0-9.,])[0-9]{1,3} $", before)  # 5 000
    if (
        grouped
        or _BINDS.search(before)
        or _is_argument(text, start)
        or not _prose_may_follow(runs[-1][0], rest)
    ):
        return None
    return Decimal(sign + re.sub(_GROUP, "", runs[-1][0]))


def _value(match: re.Match[str]) -> Decimal | None:
    """The number of a match of `_NUMBER`; None if it has two signs."""
    if match[1] and match[2]:
        return None
    sign = "-" if (match[1] or match[2] or "+") != "+" else ""
    return Decimal(sign + re.sub(_GROUP, "", match["digits"]))


def _sign_before(before: str) -> tuple[str, str]:
    """("-" or "", the text before a number without its currency and sign).

    A minus after an operand is an operator and stays in the text.
    """
    before = re.sub(rf"\\?[{_MONEY}]$", "", before)
    if before[-1:] and before[-1] in _MINUS and not re.search(r"[\w.,)\]}]$", before[:-1]):
        return "-", re.sub(rf"\\?[{_MONEY}]$", "", before[:-1])
    return "", before


def _is_argument(text: str, position: int) -> bool:
    """Whether a position is inside the braces of an exponent, an index or a command."""
    opened: list[int] = []
    for match in _BRACES.finditer(text, 0, position):
        if match[1]:
            opened.append(-1)
        elif match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            opened.pop()
    return any(
        start >= 0 and _ARGUMENT_OPENS.search(text, max(0, start - _WINDOW), start) for start in opened
    )


def _plain(text: str) -> str:
    """The text with TeX's spaces, braced digits and text commands (their words in marks) expanded."""
    text = _UNSEEN.sub("", text).replace("\u2007", "\u00a0")
    if "\\" in text or "{" in text:
        text = _WIDE.sub("  ", re.sub(r"\\\\(?!boxed)", "\n", text))
        text = _THIN.sub("\u2009", _NOTHING.sub("", text))
        for _ in range(_MAX_WRAPS):
            shorter = _GROUPED.sub(r"\1", _TEXT.sub(_text_content, text))
            if shorter == text:
                break
            text = shorter
    return re.sub(r"(?<=[0-9])~(?=[0-9A-Za-z\\\ue000])", "\u00a0", re.sub(r"\b([ap])\.m\b\.?", r"\1m", text))


def _text_content(match: re.Match[str]) -> str:
    content = match[1].replace(_OPEN, "").replace(_CLOSE, "").replace("~", " ")
    words = re.search(r"[^\W\d_]", content) and not content.lstrip().startswith("°")
    return f"{_OPEN}{content}{_CLOSE}" if words else content


def _unwrap(text: str) -> str | None:
    """The text without an enclosing pair (braces, dollars, emphasis, text command) and final full stop."""
    for _ in range(_MAX_WRAPS):
        text = text.strip()
        text = text if text.endswith("..") else text.removesuffix(".")
        inner = _inner(text)
        if inner is None:
            return text
        text = inner
    return None


def _inner(text: str) -> str | None:
    """The content of the pair of marks that encloses the whole text, or None."""
    marks = text.replace("\\$", "  ")
    for opens, closes in _WRAPS:
        if (
            len(text) > len(opens + closes)
            and marks.startswith(opens)
            and marks.find(closes, len(opens)) == len(text) - len(closes)
        ):
            return text[len(opens) : -len(closes)]
    wrapper, depth = _WRAPPER.match(text), 0
    for brace in _BRACES.finditer(text, wrapper.end() - 1 if wrapper else len(text)):
        if brace[1] or brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0 and wrapper:
            return text[wrapper.end() : -1] if brace.end() == len(text) else None
    return None


def _prose_may_follow(digits: str, rest: str) -> bool:
    """Whether ``rest`` may follow a whole number of these digits: nothing, a unit, punctuation or prose."""
    rest = rest.partition("\n")[0]
    if re.match(rf"{_GROUP}[0-9]", rest):
        return False
    rest = rest[end.end() :] if (end := _CLOSERS.match(rest)) else rest
    if (sign := _UNIT_SIGN.match(rest)) or end:
        rest = rest[sign.end() :] if sign else rest
        rest = rest[again.end() :] if (again := _CLOSERS.match(rest)) else rest
        if rest[:1] in ("{", "(", "[") or rest[:1].isdigit():
            return False
    spaced, rest = rest[:1].isspace(), rest.lstrip()
    if rest[:1] == _OPEN or _WORD.match(rest):
        return _word_may_follow(rest, spaced)
    first = rest[:1]
    if first.isdecimal() and first.isascii():
        return (
            spaced
            and not _MIXED.match(rest)
            and not (len(digits) < 4 and digits.isdecimal() and _THREE_DIGITS.match(rest))
        )
    if first == ".":
        return not re.match(r"\.(?:[.0-9]|\s*\\)", rest)
    if first in (",", ";", ":"):
        return not _LISTED.match(rest[1:])
    if first == "<" and _TAG.match(rest):
        return True
    if first in ("(", "["):
        return not _ARGUMENT.match(rest[1:])
    if first and (first in _OPERATORS or unicodedata.category(first) == "Sm"):
        return _operator_may_follow(rest, spaced)
    return first not in ("{", "\\", "…", "'", "’") and not (
        first and unicodedata.category(first) in ("No", "Nl", "Mn", "Me")
    )


def _operator_may_follow(rest: str, spaced: bool) -> bool:
    """Whether an apparent operator is punctuation: a dash or a slash before words."""
    behind = rest.lstrip(_OPERATORS + " \t\u00a0\u2009")
    word = _WORD.match(behind)
    if not behind:
        return rest.strip() in ("–", "—", "|") or (spaced and rest.strip() == "-")
    if word and word[0].lower() in _FUNCTIONS | _VALUES:
        return False
    return rest[0] in _OPERATORS and rest[0] not in "_^" and not _OPERATION.match(rest)


def _word_may_follow(rest: str, spaced: bool) -> bool:
    """Whether the word after a number is prose or a unit, rather than a variable or part of the number."""
    marked, rest = rest[0] == _OPEN, rest.removeprefix(_OPEN).lstrip()
    match = _WORD.match(rest)
    if match is None:
        return False
    word, behind = match[0].rstrip("²³"), rest[match.end() :]
    if word == "" or _is_mathematical(word):
        return False
    if word in _FUNCTIONS and not (spaced and re.match(r"\s+[^\W\d_]{2}|\s*[.,!?]?$", behind)):
        return False
    if len(word) == 1 and word.isascii():
        article = word in "aAI" and re.match(r"\s+[^\W\d_]{2}", behind)
        if not ((marked or spaced) and (word in _LETTER_UNITS or article)):
            return False
    elif word.isascii() and not (spaced or marked or word in _UNITS or len(word) >= 4):
        return False
    if _CONNECTED.match(rest) or _COMPOUND.match(rest):
        return False
    behind = behind.removeprefix(_CLOSE)
    behind = behind[power.end() :] if (power := _POWER.match(behind)) else behind
    behind = behind[close.end() :] if (close := _CLOSERS.match(behind)) else behind
    return not _OPERATION_ON_DIGITS.match(behind)


def _is_mathematical(word: str) -> bool:
    """Whether a word is part of the number before it: a constant, a scale, a numeral or a Greek letter."""
    if word.lower() in _VALUES:
        return True
    return any(
        "\u0370" <= c <= "\u03ff" or (unicodedata.numeric(c, None) is not None and not c.isdecimal())
        for c in word
    )


def _is_unit(rest: str) -> bool:
    """Whether ``rest`` is empty or a unit: ``%``, ``°``, a currency, words with powers and slashes."""
    rest = rest[sign.end() :] if (sign := _UNIT_SIGN.match(rest)) else rest
    position, words, inside, gap, alone = (
        0,
        0,
        False,
        "",
        rest[:1] not in ("", _OPEN) and not rest[:1].isspace(),
    )
    while position < len(rest) and words <= _MAX_UNIT_WORDS:
        if rest[position] in (_OPEN, _CLOSE):
            inside, position = rest[position] == _OPEN, position + 1
        elif match := _GAP.match(rest, position):
            gap, position = match[0], match.end()
        elif words and (match := _POWER.match(rest, position)):
            position = match.end()
        elif (match := _WORD.match(rest, position)) and _is_unit_word(
            match[0].rstrip("²³"), inside, "/" in gap and words > 0, alone and not words
        ):
            words, position = words + 1, match.end()
        else:
            return False
    per_nothing = rest.rstrip().endswith(("/", "·"))
    return words <= _MAX_UNIT_WORDS and (words > 0 or not rest.strip()) and not per_nothing


def _is_unit_word(word: str, inside: bool, per: bool, attached: bool) -> bool:
    lower = word.lower()
    if not word or _is_mathematical(word) or lower in _FUNCTIONS or lower in _CONNECTIVES:
        return False
    if not word.isascii() or word in _UNITS:
        return True
    if len(word) == 1:
        return word in _LETTER_UNITS and (inside or per)
    # 2abc and 2 xyz are products
    return inside or (len(word) >= 3 and not attached and re.search("[aeiouy]", lower) is not None)
