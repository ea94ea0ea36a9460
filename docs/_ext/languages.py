"""The languages of the site, and the one that this process builds."""

import os
from typing import NamedTuple


class Language(NamedTuple):
    code: str  # as Sphinx and gettext call it
    folder: str  # of the site
    tag: str  # for browsers: the lang of a page
    name: str  # in itself


ENGLISH = Language("en", "en", "en", "English")
LANGUAGES = (
    ENGLISH,
    Language("zh_CN", "zh-cn", "zh-Hans", "简体中文"),
    Language("ja", "ja", "ja", "日本語"),
)
TRANSLATED = LANGUAGES[1:]
# Set by what builds the site: see translation/build.py.
_code = os.environ.get("SITE_LANGUAGE", ENGLISH.code)
(CURRENT,) = (each for each in LANGUAGES if each.code == _code)
# Those that are built, whose pages lead to each other.
_codes = os.environ.get("SITE_LANGUAGES", ENGLISH.code).split()
BUILT = tuple(each for each in LANGUAGES if each.code in _codes)
