"""Try the tutorials with other versions of triton.

    make test-triton-versions TRITON="3.6.0 3.9.0"

Each version is installed into a folder of its own, beside everything else of
the environment. With it every tutorial runs in the interpreter, and every
test that compiles kernels for named GPUs runs. Downloads triton, so it is not
part of ``make test``.
"""

import os
import subprocess
import sys

from project import ROOT

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


def attempt(version):
    """Run everything with one version; the names of what failed."""
    env = os.environ | {
        "PYTHONPATH": str(install(version)),
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
    }
    scripts = sorted((ROOT / "tutorials").rglob("[0-9][0-9]-*.py"))
    compiled = sorted((ROOT / "tests").glob("test_*_compiled.py"))
    jobs = {f"{s.parent.name}/{s.name}": [sys.executable, s] for s in scripts}
    # What the tests of a file share is compiled once: a file stays together.
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2"]
    jobs["tests of compiled kernels"] = [
        *(*pytest, "--dist", "loadfile"),
        *compiled,
    ]
    for name, command in jobs.items():
        print(f"triton {version}: {name}", flush=True)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(done.stdout[-4000:])
            yield f"{name} with triton {version}"


def main(versions):
    failed = [name for version in versions for name in attempt(version)]
    if failed:
        sys.exit("failed: " + ", ".join(failed))
    print(f"passed with triton {', '.join(versions)}")


if __name__ == "__main__":
    main(sys.argv[1:])
