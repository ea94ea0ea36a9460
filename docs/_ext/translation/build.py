"""Build the site in its languages: ``python -m translation.build``.

English first, for it runs the tutorials. The others take from it what the
cells gave, and are built beside each other, those for which something has
changed. Then comes what stands above all languages.
"""

import os
import subprocess
import sys

from languages import ENGLISH, LANGUAGES
from translation import root, stage, untranslated


def offered(mode, lacking):
    """The languages that the site has: a preview has unfinished ones, too."""
    return [
        language
        for language in LANGUAGES
        if mode == "preview" or not lacking.get(language.code)
    ]


def arguments(language):
    """What Sphinx is told for an edition."""
    doctrees = str(stage.doctrees(language))
    folders = stage.sources(language) / "docs", root.SITE / language.folder
    how = ["-n", "-W", "--keep-going", "-c", ".", "-d", doctrees]
    return [*how, *map(str, folders)]


def sphinx(language):
    """Sphinx, started for an edition."""
    return subprocess.Popen(
        [sys.executable, "-m", "sphinx", "-q", *arguments(language)],
        cwd=stage.ROOT,
        env=os.environ
        | {
            "SITE_LANGUAGE": language.code,
            "SITE_LANGUAGES": " ".join(each.code for each in LANGUAGES),
        },
    )


def english(mode):
    """Build the English pages; the languages that the site has with them."""
    build = sphinx(ENGLISH)
    # Meanwhile what needs no page is imported and counted.
    from translation import update

    lacking = update.lacking(update.of_words() | update.of_tutorials())
    finish({ENGLISH: build})
    for code, found in update.lacking(update.of_pages()).items():
        lacking[code] |= found
    untranslated.keep(lacking)
    now = offered(mode, lacking)
    for language in LANGUAGES:
        if language not in now:
            pages = ", ".join(lacking[language.code])
            print(
                f"{language.name} is left out: not all is translated "
                f"({pages}); make translations says what."
            )
    return now


def finish(builds):
    """Wait for all, {language: build}; end as the first that failed."""
    ended = {language: build.wait() for language, build in builds.items()}
    failed = [language for language, code in ended.items() if code]
    for language in failed:
        # Of what Sphinx has read it would not warn again.
        known = stage.doctrees(language) / "environment.pickle"
        known.unlink(missing_ok=True)
    if failed:
        sys.exit(ended[failed[0]])


def main():
    languages = english(os.environ.get("FIGURES", "auto"))
    root.set_aside(languages)
    started = {}
    for language in languages[1:]:
        inputs = stage.inputs(language)
        stamp = stage.doctrees(language) / "inputs"
        front = root.SITE / language.folder / "index.html"
        if front.exists() and stamp.exists() and stamp.read_text() == inputs:
            continue
        stamp.unlink(missing_ok=True)
        stage.stage(language)
        build = sphinx(language)
        started[language] = build, stamp, inputs
    for build, stamp, inputs in started.values():
        if build.wait() == 0:
            stamp.write_text(inputs)
    finish({language: build for language, (build, *_) in started.items()})
    root.write(languages)


if __name__ == "__main__":
    main()
