"""Install the wheels into an empty environment and run the README's lines from there: the library's without Triton,
then with it, then both with an extra; then tests of the archive of sources. `make dist` calls it.

    python scripts/try_wheel.py dist/quire-*.whl dist/quire_tools-*.whl dist/quire-*.tar.gz torch==2.15.0 triton==3.9.0

Each step adds packages to the same environment, so that each line runs where only its own packages are. Nothing is
imported from the repository: the working directory is empty, or that of the unpacked archive, whose tests take the
installed wheel. The extra `vllm` is not installed: `make test-vllm` tests it from source.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
OK, BAD_ARGUMENTS = 0, 2
NO_TOOLS = "needs quire_tools, which is not installed; pip install . ./tools"
WHERE = "import quire, sys; assert quire.__file__.startswith(sys.prefix), quire.__file__"
TESTS = ("tests/test_api.py", "tests/test_nouns.py", "tests/test_cpu_path.py")  # a minute of them
TYPED = "import importlib.resources as r; assert r.files('quire').joinpath('py.typed').is_file()"


def main() -> None:
    """Parse the arguments, build the environment, run the lines in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of the library")
    parser.add_argument("tools", type=Path, help="the wheel of the tools")
    parser.add_argument("archive", type=Path, help="of the library's sources")
    parser.add_argument("packages", nargs="+", help="torch and triton, as pip takes them")
    args = parser.parse_args()
    torch = [package for package in args.packages if package.startswith("torch")]
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as folder:
        wheel, tools = str(args.wheel.resolve()), str(args.tools.resolve())
        home = Environment(Path(folder))
        readme = re.findall(
            r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
        assert readme, "README.md must have a block of Python"

        print("== without Triton, as on systems that it has no wheels for")
        home.pip("install", *torch)
        home.pip("uninstall", "--yes", "triton")
        home.pip("install", "--no-deps", wheel)
        home.python(WHERE)
        home.python(TYPED)
        home.python("import importlib.util; assert importlib.util.find_spec('triton') is None")
        for block in readme:
            home.python(block)
        home.python("from quire.integrations.flash_attn import flash_attn_varlen_func")
        home.quire("env")
        home.quire("bench", "list", code=BAD_ARGUMENTS, says=NO_TOOLS)

        print("== without Triton, with the tools")
        home.pip("install", "--no-deps", tools)
        home.quire("bench", "list", code=BAD_ARGUMENTS, says="needs triton, which is not installed")
        home.quire("tune", code=BAD_ARGUMENTS, says="needs triton, which is not installed")
        home.pip("uninstall", "--yes", "quire-tools")

        print("== without the tools and extras")
        home.pip("install", wheel, *args.packages)
        home.pip("check")
        for block in readme:
            home.python(block)
        home.quire("env", says="triton")
        home.quire("check", "--dtype", "float32", "--fail-fast", says=", 0 failed")
        home.quire("--help", says="bench")
        home.quire("bench", code=BAD_ARGUMENTS, says=NO_TOOLS)
        home.quire("tune", "--explain", code=BAD_ARGUMENTS, says=NO_TOOLS)
        home.quire("generate", code=BAD_ARGUMENTS, says="pip install 'transformers<")

        print("== with the tools and the extra transformers")
        home.pip("install", f"{wheel}[transformers]", tools, *args.packages)
        home.pip("check")
        home.python("from quire.integrations.transformers import use")
        home.quire("bench", "list")
        home.quire("bench", "roofline", "--quick", "--no-compile", says="report.html")
        home.quire("tune", "--explain")
        home.quire("generate", code=BAD_ARGUMENTS, says="the demo model is in Quire's repository")
        home.quire("generate", "--model", str(ROOT / "src/quire/demo_model"), says="tokens")

        print("== tests of the archive of sources")
        with tarfile.open(args.archive) as file:
            file.extractall(Path(folder, "archive"), filter="data")
        (sources,) = Path(folder, "archive").iterdir()
        home.pip("install", "--upgrade", "pip")  # the first that knows groups is 25.1
        home.pip("install", "--group", f"{sources / 'pyproject.toml'}:dev", *args.packages)
        home.outside = sources
        home.python(WHERE)
        home.run("python", "-m", "pytest", *TESTS, says=" passed")
    print(f"{args.wheel.name}, {args.tools.name} and {args.archive.name} are fit")


class Environment:
    """A virtual environment, and an empty folder from which its programs run.

    Args:
        folder: an empty folder for both.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.outside = folder / "outside"
        self.outside.mkdir()
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))
        }

    def run(self, *command: str, code: int = OK, says: str = "") -> None:
        """Run a program of the environment; leave with its output unless it ends with `code` and prints `says`."""
        line = " ".join(part if "\n" not in part else "(README.md)" for part in command)
        print(f"   {line}", flush=True)
        output, error = subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.outside,
            env=self.variables,
            stdout=output,
            stderr=error,
            text=True,
        )
        if done.returncode != code or says not in done.stdout:
            wanted = f"{code} and say {says!r}" if says else str(code)
            sys.exit(f"{done.stdout}\n{line} must leave with {wanted}, got {done.returncode}")

    def pip(self, *arguments: str) -> None:
        """Run pip."""
        self.run("python", "-m", "pip", "--disable-pip-version-check", *arguments)

    def python(self, program: str) -> None:
        """Run a program in Python."""
        self.run("python", "-c", program)

    def quire(self, *arguments: str, code: int = OK, says: str = "") -> None:
        """Run the command `quire`."""
        self.run("quire", *arguments, code=code, says=says)


if __name__ == "__main__":
    main()
