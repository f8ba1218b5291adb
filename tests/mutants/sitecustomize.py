"""On the PYTHONPATH of every process of run.py: without the finder of an editable install, which would find what is not broken."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
