"""The recognizers, as data: what each type looks like, how it is validated, which labels announce it.

Sources: GB 11643-1999 (citizen numbers), the numbering plan of the MIIT (mobiles), ISO/IEC 7812 and the
public BIN ranges of the card schemes. ASCII boundaries are explicit everywhere: `\\b`
counts Han characters as word characters and so misses a number that touches Chinese text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from sealmesh.gateway.pii.checksums import gb11643_check, luhn_check, plausible_birth_date
from sealmesh.gateway.pii.glue import Glue

# What stands between a label and its value; sentence ends do not, they part the two.
_FILLER = " \t\r\n:：=\"'“”‘’`*|>()（）[]【】<《「『_-#~/\\"
_COPULAS = ("是", "为", "即", " is", " are", " was", "=")
_NUMBER_WORDS = ("号码", "号", "no", "num", "number", "no.")


class Labels:
    """Words that announce a value, for example "手机号：" or "id_card_no=".

    Words are given in lower case; a space in one stands for a space, underscore, dash or nothing.
    """

    __slots__ = ("_ascii", "_han")

    def __init__(self, *words: str) -> None:
        spelled = {word.replace(" ", joint) for word in words for joint in (" ", "_", "-", "")}
        self._ascii = tuple(sorted(word for word in spelled if word.isascii()))
        self._han = tuple(sorted(word for word in spelled if not word.isascii()))

    def announce(self, before: str) -> bool:
        """Whether the text that stands right before a value ends in a label and its usual filler."""
        tail = before.lower().rstrip(_FILLER)
        for copula in _COPULAS:
            if tail.endswith(copula):
                tail = tail.removesuffix(copula).rstrip(_FILLER)
                break
        if self._ends(tail):
            return True
        for word in _NUMBER_WORDS:
            if tail.endswith(word):
                return self._ends(tail.removesuffix(word).rstrip(" _-"))
        return False

    def _ends(self, tail: str) -> bool:
        if tail.endswith(self._han):
            return True
        # An ASCII word must begin where it seems to: "excel" does not announce a cell phone.
        return tail.endswith(self._ascii) and any(
            tail.endswith(word) and not tail[: -len(word)][-1:].isalpha() for word in self._ascii
        )


@dataclass(frozen=True, slots=True)
class NumberRecognizer:
    """Finds numbers in a chain of digit groups.

    `shape` is matched on the bare digits at the start of a group and must hold for every valid value;
    `lengths` are the lengths to try, longest first. A valid value scores `score`, more beside a label. A
    value that is not valid but follows a label and fits `labelled` scores 0.7: its owner called it personal.
    `layouts` are the group sizes in which people write it; `any_layout` drops that test where validation is
    strong enough alone. `glued` says whether a valid value counts although ASCII letters touch it, given
    these letters and whether a label announces it.
    """

    type: str
    priority: int
    shape: re.Pattern[str]
    lengths: tuple[int, ...]
    valid: Callable[[str], bool]
    score: Callable[[str], float]
    labels: Labels
    labelled: re.Pattern[str]
    glued: Callable[[Glue, bool], bool]
    layouts: frozenset[tuple[int, ...]] = field(default_factory=frozenset)
    any_layout: bool = False
    country_code: bool = False


# GB/T 2260 province codes, and 81/82/83 for residence permits of Hong Kong, Macao and Taiwan residents.
_PROVINCES = frozenset(
    f"{code}"
    for code in (
        *range(11, 16),
        *range(21, 24),
        *range(31, 38),
        *range(41, 47),
        *range(50, 55),
        *range(61, 66),
        71,
        81,
        82,
        83,
        91,
    )
)


def _valid_cn_id(number: str) -> bool:
    return plausible_birth_date(number[6:14]) and gb11643_check(number)


def _score_cn_id(number: str) -> float:
    # Real numbers with regions that no table lists exist, so the region speaks only to confidence.
    return 0.95 if number[:2] in _PROVINCES else 0.75


def _glued_cn_id(_glue: Glue, _labelled: bool) -> bool:
    # A date and a check character: one run of 18 random digits in some hundred thousand passes.
    return True


CN_ID = NumberRecognizer(
    type="CN_ID",
    priority=40,
    shape=re.compile(r"[1-9]\d{5}(?:19|20)\d\d[01]\d[0-3]\d{4}[\dX]"),
    lengths=(18,),
    valid=_valid_cn_id,
    score=_score_cn_id,
    labels=Labels(
        *("身份证", "身份证件", "公民身份", "证件", "身份号", "居住证", "身份證", "身分證"),
        *("id card", "identity", "identity card", "national id", "citizen id", "sfz"),
    ),
    labelled=re.compile(r"[1-9](?:\d{14}|\d{15,16}[\dX]|\d{18})"),
    glued=_glued_cn_id,
    any_layout=True,
)


def _always(_number: str) -> bool:
    return True


def _score_mobile(_number: str) -> float:
    return 0.85


def _glued_mobile(glue: Glue, labelled: bool) -> bool:
    # No check digit: letters on both sides are a serial number rather ("A13812345678B"), unless they label.
    return not glue.like_a_hash() and (labelled or not (glue.before and glue.after))


CN_MOBILE = NumberRecognizer(
    type="CN_MOBILE",
    priority=20,
    shape=re.compile(r"(?:00860?|86)?1[3-9]\d{9}"),
    lengths=(15, 13, 11),
    valid=_always,
    score=_score_mobile,
    labels=Labels(
        *("手机", "手機", "电话", "電話", "联系方式", "来电", "致电", "拨打", "短信", "微信"),
        *("mobile", "mobile phone", "phone", "cell", "cell phone", "tel", "telephone"),
        *("contact", "call", "sms", "whatsapp", "wechat", "weixin", "wx", "vx", "qq"),
    ),
    labelled=re.compile(r"1\d{10}"),
    glued=_glued_mobile,
    layouts=frozenset({(3, 4, 4), (4, 4, 3), (3, 8), (7, 4), (3, 3, 5), (3, 5, 3)}),
    country_code=True,
)

_CARD_LENGTHS: tuple[tuple[re.Pattern[str], frozenset[int]], ...] = (
    (
        re.compile(r"62|81|60(?!11)|9558"),
        frozenset({16, 17, 18, 19}),
    ),  # UnionPay and older Chinese debit BINs
    (re.compile(r"4"), frozenset({13, 16, 19})),  # Visa
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), frozenset({16})),  # Mastercard
    (re.compile(r"3[47]"), frozenset({15})),  # American Express
    (re.compile(r"3(?:0[0-5]|095|[689])"), frozenset({14, 16, 19})),  # Diners Club
    (re.compile(r"6011|64[4-9]|65"), frozenset({16, 19})),  # Discover
    (re.compile(r"35"), frozenset({16})),  # JCB
    (re.compile(r"(?:2131|1800)"), frozenset({15})),  # JCB, older
    (re.compile(r"5[0678]|6[37]"), frozenset({16, 17, 18, 19})),  # Maestro
)


def _valid_card(number: str) -> bool:
    size = len(number)
    return any(size in sizes and bin_.match(number) for bin_, sizes in _CARD_LENGTHS) and luhn_check(number)


def _score_card(number: str) -> float:
    return 0.9 if len(number) >= 15 else 0.8


def _glued_card(glue: Glue, _labelled: bool) -> bool:
    # One run of digits in thirty has a BIN and a check digit: few, yet not few enough inside a hash.
    return not glue.like_a_hash()


BANK_CARD = NumberRecognizer(
    type="BANK_CARD",
    priority=30,
    shape=re.compile(r"(?:[23456]|81|9558|1800)\d{11}"),
    lengths=(19, 18, 17, 16, 15, 14, 13),
    valid=_valid_card,
    score=_score_card,
    labels=Labels(
        *("银行卡", "銀行卡", "借记卡", "储蓄卡", "信用卡", "贷记卡", "卡", "账户", "帐户", "账", "帐"),
        *("card", "credit card", "debit card", "bank card", "payment card", "cc", "pan", "account"),
        *("visa", "mastercard", "maestro", "amex"),
    ),
    labelled=re.compile(r"\d{12,19}"),
    glued=_glued_card,
    layouts=frozenset(
        {
            (4, 4, 4, 4),
            (4, 4, 4, 4, 3),
            (4, 4, 4, 4, 2),
            (4, 4, 4, 4, 1),
            (4, 6, 5),
            (4, 6, 4),
            (6, 13),
            (6, 10),
        }
    ),
)

NUMBER_RECOGNIZERS: tuple[NumberRecognizer, ...] = (CN_ID, BANK_CARD, CN_MOBILE)
