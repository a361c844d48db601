r"""A slow reading of numbers in LaTeX, character by character, for the tests; imports none of the code under
test.

``visible`` writes out what a reader of the typeset text sees.  ``digits_if_a_number`` then takes that apart
by hand: it gives the digits (with sign and point) where everything seen belongs to one number or to a unit in
words, else None.  It knows less than a reader does: words are units if they are in ``WORDS``, or stand apart,
have three letters and a vowel.
"""

from __future__ import annotations

from fractions import Fraction

SHOWN = ("text", "mathbf", "mathrm", "textbf", "mbox")  # commands that show their argument
THIN = "\u2009"
WORDS = ("eggs", "dollars", "km", "cm", "miles per hour", "square feet")
MATHEMATICAL = set("^_/*=!()[]|<>~±×÷√∞½²:;'")


def visible(text: str) -> str | None:
    r"""What is seen: spaces of TeX as spaces, braces gone; None where a command or an index makes it
    mathematics.
    """
    seen, place, braces = "", 0, 0
    while place < len(text):
        c = text[place]
        if c == "\\":
            name = text[place + 1 : place + 2]
            if name.isalpha():
                end = place + 1
                while end < len(text) and text[end].isalpha():
                    end += 1
                command = text[place + 1 : end]
                if command == "quad":
                    seen, place = seen + "  ", end
                    continue
                if command not in SHOWN or text[end : end + 1] != "{":
                    return None
                place = end
                continue
            if name in (",", ";", ":", " "):
                seen += THIN
            elif name in ("%", "$"):
                seen += name
            elif name != "!":
                return None
            place += 2
            continue
        if c == "{":
            braces += 1
        elif c == "}":
            braces -= 1
            if braces < 0:
                return None
        else:
            seen += c
        place += 1
    return seen if braces == 0 else None


def digits_if_a_number(text: str) -> str | None:
    """Sign, digits and point of the one number that the whole text shows, or None."""
    seen = visible(text)
    if seen is None or any(c in MATHEMATICAL for c in seen):
        return None
    seen = seen.strip()
    if seen.startswith("$") and seen.endswith("$") and len(seen) > 1:
        seen = seen[1:-1].strip()
    for _ in range(len(seen)):
        known = [word for word in WORDS if seen.endswith(word)]
        last = seen.split()[-1:] or [""]
        if not known and last[0].isalpha() and len(last[0]) >= 3 and any(c in "aeiouy" for c in last[0]):
            known = last
        seen = seen[: len(seen) - max(map(len, known), default=0)].rstrip()
    seen = seen.removesuffix(".").rstrip()
    seen = seen.removesuffix("%").removesuffix("$").rstrip()
    sign = ""
    for marks in ("$", "+-", "$", "$", "+-", "$"):
        if seen[:1] and seen[0] in marks:
            if marks == "+-":
                if sign:
                    return None
                sign = seen[0]
            seen = seen[1:].lstrip()
    whole, point, part = seen.partition(".")
    if point and (not part or not all("0" <= c <= "9" for c in part)):
        return None
    for separator in (",", THIN):
        pieces = whole.split(separator)
        if len(pieces) > 1:
            if (
                not 1 <= len(pieces[0]) <= 3
                or pieces[0].startswith("0")
                or any(len(piece) != 3 for piece in pieces[1:])
            ):
                return None
            whole = "".join(pieces)
    if not all("0" <= c <= "9" for c in whole) or not whole + part:
        return None
    return sign.replace("+", "") + whole + point + part


def value(digits: str) -> Fraction:
    """The exact value of sign, digits and point, digit by digit."""
    sign = -1 if digits.startswith("-") else 1
    whole, _, part = digits.removeprefix("-").partition(".")
    number = 0
    for c in whole + part:
        number = 10 * number + (ord(c) - ord("0"))
    return Fraction(sign * number, 10 ** len(part))
