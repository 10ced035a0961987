"""Check digits and dates of the numbers that the recognizers validate."""

from __future__ import annotations

import calendar

_GB11643_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_GB11643_CHECK = "10X98765432"


def gb11643_check(number: str) -> bool:
    """Whether an 18-character citizen number ends in its ISO 7064 mod 11-2 check character (GB 11643)."""
    total = sum(weight * (ord(char) - 48) for weight, char in zip(_GB11643_WEIGHTS, number, strict=False))
    return number[17] == _GB11643_CHECK[total % 11]


def plausible_birth_date(digits: str) -> bool:
    """Whether YYYYMMDD is a day of the calendar between 1900 and 2099."""
    year, month, day = int(digits[:4]), int(digits[4:6]), int(digits[6:8])
    return 1900 <= year <= 2099 and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]


_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)


def luhn_check(digits: str) -> bool:
    """Whether the last digit is the Luhn check digit of the others (ISO/IEC 7812-1, annex B)."""
    if not digits.isdecimal():
        return False
    total = sum(map(int, digits[-1::-2])) + sum(_DOUBLED[ord(char) - 48] for char in digits[-2::-2])
    return total % 10 == 0
