"""Both projects on pixfuse's ops: three lines before anything of the project is imported."""

import runpy
from pathlib import Path

import pixfuse.compat

pixfuse.compat.install("nvlabs")
pixfuse.compat.install("basicsr")

for script in ("discriminator.py", "restorer.py"):  # unchanged
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
