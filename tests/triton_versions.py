"""Try the tutorials with other versions of triton.

    make test-triton-versions TRITON="3.6.0 3.9.0" TUTORIALS="layer-norm/01"

Each version is installed into a folder of its own, beside everything else of
the environment. With it every tutorial runs in the interpreter, with all its
checks, and its kernels are compiled for sm_90. What comes of it is written
into docs/triton-versions.json, page by page, and pages show it at their end.
Downloads triton, so it is not part of ``make test``.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from compile_pages import last_line
from project import ROOT

import tutorial
from measurements import recording
from page import checked

# What a version needs beside itself. The interpreter of triton 3.6 was
# written for an older NumPy.
EXTRA = {"3.6.0": ["numpy<2.4"]}


def install(version):
    folder = ROOT / "docs" / "_build" / f"triton-{version}"
    if not (folder / "triton").exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet"),
                *("--no-deps", "--target", folder),
                *(f"triton=={version}", *EXTRA.get(version, [])),
            ],
            check=True,
        )
    return folder


def environment(folder):
    """Where a version comes before the one that is installed."""
    ours = [folder, ROOT / "docs/_ext", ROOT / "tests"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, ours)),
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
    }


def interpreted(name, env):
    """What came of a script and its checks: "passed" or a sentence."""
    done = subprocess.run(
        [sys.executable, tutorial.script_of(name)],
        env=env,
        capture_output=True,
        text=True,
    )
    return last_line(done.stderr) if done.returncode else checked.PASSED


def compiled(names, env):
    """For each page, as it is done, what came of its kernels."""
    command = [sys.executable, ROOT / "tests" / "compile_pages.py", *names]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        sys.exit(f"{command[1]} ended with {process.returncode}")


def attempt(version, names):
    """Try pages with a version, and keep what comes of each."""
    env = environment(install(version))
    # Before anything runs: of a page that changes meanwhile this is the old
    # one.
    codes = {name: recording.code_of(name) for name in names}
    for name, kernels in compiled(names, env):
        script = {"interpreter": interpreted(name, env)}
        entry = {
            "code": codes[name],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        entry |= script | kernels
        print(f"triton {version}: {name}: {said(entry)}", flush=True)
        keep(version, name, entry)
        if checked.broke(entry):
            yield f"{name} with triton {version}"


def keep(version, name, entry):
    """Write what came of a page, and forget pages that are gone."""
    found = checked.read()
    found.setdefault(version, {})[name] = entry
    there = chosen([])
    for pages in found.values():
        for gone in pages.keys() - set(there):
            del pages[gone]
    checked.write(found)


def said(entry):
    """What came of a page, in a line."""
    parts = [
        f"interpreter: {entry['interpreter']}",
        f"compiled: {entry['compiled']}",
        *entry["beyond"],
    ]
    return "; ".join(parts)


def chosen(beginnings):
    """The pages whose names begin so; without a beginning, all."""
    names = map(tutorial.name_of, tutorial.scripts())
    return [n for n in names if n.startswith(tuple(beginnings) or "")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--tutorials", nargs="*", default=[])
    asked = parser.parse_args()
    names = chosen(asked.tutorials)
    if not names:
        sys.exit(f"no tutorial begins with {' or '.join(asked.tutorials)}")
    broken = [
        page for version in asked.versions for page in attempt(version, names)
    ]
    if broken:
        sys.exit("broken: " + ", ".join(broken))
    print(f"passed with triton {', '.join(asked.versions)}")


if __name__ == "__main__":
    main()
