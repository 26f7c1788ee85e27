# SPDX-License-Identifier: Apache-2.0
"""Write examples/README.md and its pictures, from one run of all examples.

    python tools/gallery.py
    python tools/gallery.py --jobs 4

It needs what the examples need: matplotlib, scikit-learn, torchvision, transformers,
Hydra, optuna and pandas. `tests/docs/test_examples.py` fails where page and scripts
disagree.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
PICTURES = EXAMPLES / "pictures"
LARGEST_PICTURE = 36 * 1024
ARGUMENTS = {
    "mnist_pipeline.py": ["--data", "digits"],
    "scaling_curve.py": ["--epochs", "2"],
}
"""Arguments of the scripts that aren't run as they are."""
SECTIONS = {
    "Begin here": [
        "first_steps.py",
        "mnist_pipeline.py",
        "early_stopping.py",
        "resume.py",
    ],
    "Before anything is compiled": ["check.py", "plan.py", "automatic_split.py"],
    "Batches, replicas, processes": [
        "replicas.py",
        "output_modes.py",
        "several_processes.py",
        "scaling_curve.py",
        "own_options.py",
        "half_precision.py",
    ],
    "Networks and losses": [
        "fine_tuning.py",
        "text_classification.py",
        "bert.py",
        "ctc.py",
        "time_series.py",
        "gan.py",
        "segmentation.py",
        "gpt.py",
        "tabular.py",
    ],
    "Looking inside, and changing things": [
        "log_from_step.py",
        "observing.py",
        "annealed_value.py",
        "optuna_sweep.py",
        "hydra_settings.py",
    ],
    "Code from elsewhere": ["poptorch_script.py", "lightning_module.py"],
}
INTRODUCTION = """\
# Examples

    python examples/first_steps.py

Each script has one idea, runs on IPUs and, unchanged, on the emulator, and needs no
internet access. Its last line prints the number that its docstring promises. `--help`
lists its arguments, and `--plot FILE` draws what it found with matplotlib. What some of
them need is installed by `pip install ".[examples]"`.

`python tools/gallery.py` has written this page from one run of all scripts, on the
emulator with one thread. Seconds are those of a processor.

"""
END = """\
## Others

[handwriting.py](handwriting.py) is a module of the scripts. It finds or downloads the
images, and imports torchvision even if its build doesn't fit the installed torch.

[ports/](ports/README.md) has three programs of Graphcore's with their features kept,
and the same written by hand beside them.
"""


class Result(NamedTuple):
    """What a script did.

    Attributes:
        number: The last line that it printed.
        seconds: Time of a processor that it and its processes took.
    """

    number: str
    seconds: float


def docstring(script: str) -> str:
    """The docstring of a script."""
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""


def title(script: str) -> str:
    """The first line of the docstring."""
    return docstring(script).partition("\n")[0]


def description(script: str) -> str:
    """The paragraph that says what the script shows, in one line."""
    [found] = re.findall(r"^Shows .*?(?=\n\n|\Z)", docstring(script), re.M | re.S)
    return " ".join(found.split())


def command(script: str) -> list[str]:
    """The first command of the docstring with `python`, without arguments."""
    pattern = rf"^ +python ((?:-m ipufit\.emulator )?)examples/{script}"
    found = re.search(pattern, docstring(script), re.M)
    if found is None:
        raise SystemExit(f"{script} doesn't say how to run it.")
    return [*found.group(1).split(), f"examples/{script}"]


def run(script: str) -> Result:
    """Run a script, which draws its picture.

    Args:
        script: Its name in the folder of examples.

    Returns:
        Its last line, and how long it took.
    """
    picture = PICTURES / f"{Path(script).stem}.png"
    arguments = [*ARGUMENTS.get(script, []), "--plot", str(picture)]
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "matplotlibrc")
        settings.write_text("savefig.dpi: 110\nfont.size: 9\n", encoding="utf-8")
        environment = {
            **os.environ,
            "IPUFIT_BACKEND": "emulator",
            "MATPLOTLIBRC": str(settings),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        printed = Path(folder, "printed")
        with printed.open("w") as file:
            started = subprocess.Popen(
                [sys.executable, *command(script), *arguments],
                stdout=file,
                env=environment,
                cwd=ROOT,
            )
        _, started.returncode, usage = os.wait4(started.pid, 0)  # its processes, too
        if started.returncode:
            raise SystemExit(f"{script} failed.")
        number = printed.read_text(encoding="utf-8").splitlines()[-1]
    shrink(picture)
    seconds = usage.ru_utime + usage.ru_stime
    print(f"{script}: {number} ({seconds:.1f} s)", flush=True)
    return Result(number, seconds)


def shrink(picture: Path) -> None:
    """Store a picture in at most 64 colours, which is what lines and text need."""
    from PIL import Image  # comes with matplotlib

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)
    if picture.stat().st_size > LARGEST_PICTURE:
        raise SystemExit(f"{picture} has {picture.stat().st_size} bytes: too many.")


def row(script: str, result: Result) -> str:
    """The line of a script in the table."""
    link = f"[{script}]({script})"
    return f"| {link} | {title(script)} | {result.number} | {result.seconds:.0f} |\n"


def entry(script: str) -> str:
    """The part of the page about a script, without what its run gave."""
    picture = f"pictures/{Path(script).stem}.png"
    line = " ".join(["python", *command(script)])
    return (
        f"### {Path(script).stem}\n\n{description(script)}\n\n    {line}\n\n"
        f"![What {script} draws]({picture})\n\n"
    )


def page(results: dict[str, Result]) -> str:
    """The whole page."""
    heading = "| script | about | last line | seconds |\n|---|---|---|---:|\n"
    text = INTRODUCTION
    text += heading + "".join(row(script, one) for script, one in results.items())
    for section, scripts in SECTIONS.items():
        text += f"\n## {section}\n\n" + "".join(map(entry, scripts)).rstrip("\n") + "\n"
    return f"{text}\n{END}"


def main() -> None:
    """Run all scripts, and write page and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="scripts at one time")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    scripts = [script for part in SECTIONS.values() for script in part]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(scripts, pool.map(run, scripts)))
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
