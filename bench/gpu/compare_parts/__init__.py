"""Parts of compare.py and compare_http.py. Imported first, it makes the modules of bench/ and the package
importable, wherever the programs are started and whether or not Ratoon is installed."""

import sys
from pathlib import Path

GPU_FOLDER = Path(__file__).resolve().parent.parent
REPOSITORY = GPU_FOLDER.parent.parent

sys.path[:0] = [str(GPU_FOLDER.parent), str(REPOSITORY)]
